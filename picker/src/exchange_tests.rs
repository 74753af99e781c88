//! Golden exchanges: what Envoy sends, what it must get.

use super::*;

fn headers(list: &[(&str, &str)]) -> Vec<Header> {
    list.iter()
        .map(|(name, value)| Header { name: (*name).into(), value: Bytes::copy_from_slice(value.as_bytes()) })
        .collect()
}

fn start(end_of_stream: bool, mode: BodyMode) -> Part {
    start_with(&[(":method", "POST"), (":path", "/v1/completions"), ("x-request-id", "mine")], end_of_stream, mode)
}

fn start_with(list: &[(&str, &str)], end_of_stream: bool, mode: BodyMode) -> Part {
    Part::RequestHeaders {
        headers: headers(list),
        end_of_stream,
        request_mode: mode,
        response_mode: mode,
        subset: None,
    }
}

fn piece(bytes: &[u8], end_of_stream: bool) -> Part {
    Part::RequestBody { bytes: Bytes::copy_from_slice(bytes), end_of_stream }
}

fn go() -> Verdict {
    Verdict::Go { destination: "10.0.0.1:8000".into(), rank: None, request_id: "picked".into() }
}

fn asked(step: Step) -> Ask {
    match step {
        Step::Decide(ask) => *ask,
        other => panic!("a decision was due, not {other:?}"),
    }
}

/// The body that Envoy would send upstream, how many messages it came in, and whether its end was said exactly once,
/// at the last of them.
fn body_of(replies: &[Reply]) -> (Vec<u8>, usize, bool) {
    let pieces: Vec<(&Bytes, bool)> = replies
        .iter()
        .filter_map(|reply| match reply {
            Reply::RequestPiece { bytes, end_of_stream } => Some((bytes, *end_of_stream)),
            _ => None,
        })
        .collect();
    let ends: Vec<usize> = pieces.iter().enumerate().filter(|(_, p)| p.1).map(|(i, _)| i).collect();
    let body = pieces.iter().flat_map(|(bytes, _)| bytes.to_vec()).collect();
    (body, pieces.len(), ends == [pieces.len().wrapping_sub(1)])
}

#[test]
fn nothing_is_said_before_the_bodys_end_and_then_headers_come_first() {
    let mut exchange = Exchange::new(1 << 20);
    assert_eq!(exchange.take(start(false, BodyMode::Duplex)), Step::Wait);
    assert_eq!(exchange.take(piece(b"{\"a\":", false)), Step::Wait);
    assert!(!exchange.complete());
    let ask = asked(exchange.take(piece(b"1}", true)));
    assert_eq!(ask.body.as_deref(), Some(&b"{\"a\":1}"[..]));
    assert_eq!((ask.path.as_str(), ask.client_id.as_deref()), ("/v1/completions", Some("mine")));
    let replies = exchange.decided(go());
    let Some(Reply::RequestHeaders(Some(choice))) = replies.first() else { panic!("{replies:?}") };
    assert_eq!(choice.destination, "10.0.0.1:8000");
    assert!(choice.set.contains(&(DESTINATION, "10.0.0.1:8000".into())), "header and metadata are equal");
    assert!(choice.set.contains(&(REQUEST_ID, "picked".into())));
    assert!(choice.set.contains(&(CLIENT_REQUEST_ID, "mine".into())));
    assert!(choice.remove.contains(&RANK) && CONTROL.iter().all(|name| choice.remove.contains(name)));
    assert_eq!(body_of(&replies), (b"{\"a\":1}".to_vec(), 1, true));
    assert_eq!(replies.len(), 2);
    assert!(exchange.complete());
}

#[test]
fn a_second_end_of_the_body_is_ignored() {
    let mut exchange = Exchange::new(1 << 20);
    exchange.take(start(false, BodyMode::Duplex));
    asked(exchange.take(piece(b"{}", true)));
    assert_eq!(exchange.take(piece(b"{}", true)), Step::Wait);
    assert_eq!(body_of(&exchange.decided(go())).0, b"{}");
    assert_eq!(exchange.take(piece(b"", true)), Step::Wait);
    assert_eq!(exchange.take(Part::RequestTrailers), Step::Wait);
    assert_eq!(exchange.decided(go()), [], "a verdict is taken once");
}

#[test]
fn pieces_are_as_large_as_proxies_take_and_the_end_is_said_once() {
    for (length, count) in [
        (0, 1),
        (PIECE_BYTES - 1000, 1),
        (PIECE_BYTES, 1),
        (PIECE_BYTES + 1, 2),
        (PIECE_BYTES + 1000, 2),
        (2 * PIECE_BYTES + 1000, 3),
        (2 << 20, 34),
    ] {
        let body: Vec<u8> = (0..length).map(|i| (i % 251) as u8).collect();
        let mut exchange = Exchange::new(4 << 20);
        exchange.take(start(false, BodyMode::Duplex));
        for chunk in body.chunks(128 << 10) {
            assert_eq!(exchange.take(piece(chunk, false)), Step::Wait);
        }
        asked(exchange.take(piece(b"", true)));
        let replies = exchange.decided(go());
        assert!(body_of(&replies) == (body, count, true), "{length} bytes");
        assert_eq!(replies.len(), count + 1);
    }
}

#[test]
fn trailers_end_a_body_that_never_says_so() {
    let mut exchange = Exchange::new(1 << 20);
    exchange.take(start(false, BodyMode::Duplex));
    exchange.take(piece(b"{}", false));
    assert_eq!(asked(exchange.take(Part::RequestTrailers)).body.as_deref(), Some(&b"{}"[..]));
    let replies = exchange.decided(go());
    assert_eq!(
        replies[1..],
        [Reply::RequestPiece { bytes: Bytes::from_static(b"{}"), end_of_stream: false }, Reply::RequestTrailers]
    );
}

#[test]
fn trailers_without_a_body_get_no_piece() {
    let mut exchange = Exchange::new(1 << 20);
    exchange.take(start(false, BodyMode::Duplex));
    asked(exchange.take(Part::RequestTrailers));
    assert!(matches!(exchange.decided(go()).as_slice(), [Reply::RequestHeaders(Some(_)), Reply::RequestTrailers]));
}

#[test]
fn a_request_without_a_body_is_answered_at_its_headers() {
    for mode in [BodyMode::Duplex, BodyMode::Buffered, BodyMode::Blind] {
        let mut exchange = Exchange::new(1 << 20);
        assert_eq!(asked(exchange.take(start(true, mode))).body, None);
        assert!(matches!(exchange.decided(go()).as_slice(), [Reply::RequestHeaders(Some(_))]), "{mode:?}");
        assert!(exchange.complete());
    }
}

#[test]
fn buffered_answers_headers_at_once_and_chooses_at_the_body() {
    let mut exchange = Exchange::new(1 << 20);
    assert_eq!(exchange.take(start(false, BodyMode::Buffered)), Step::Send(vec![Reply::RequestHeaders(None)]));
    assert_eq!(asked(exchange.take(piece(b"{}", false))).body.as_deref(), Some(&b"{}"[..]));
    assert!(
        matches!(exchange.decided(go()).as_slice(), [Reply::RequestBody(Some(c))] if c.destination == "10.0.0.1:8000")
    );
    assert_eq!(exchange.take(Part::RequestTrailers), Step::Send(vec![Reply::RequestTrailers]));
}

#[test]
fn modes_that_cannot_wait_for_a_body_choose_at_the_headers() {
    let mut exchange = Exchange::new(1 << 20);
    assert_eq!(asked(exchange.take(start(false, BodyMode::Blind))).body, None);
    assert!(matches!(exchange.decided(go()).as_slice(), [Reply::RequestHeaders(Some(_))]));
    assert_eq!(exchange.take(piece(b"{}", true)), Step::Send(vec![Reply::RequestBody(None)]));
}

#[test]
fn a_body_over_the_limit_is_413_at_the_byte_and_by_its_announcement() {
    let is_413 =
        |step: Step| matches!(step, Step::Send(r) if matches!(r.as_slice(), [Reply::Immediate(r)] if r.status == 413));
    let mut exchange = Exchange::new(10);
    exchange.take(start(false, BodyMode::Duplex));
    assert_eq!(exchange.take(piece(b"0123456789", false)), Step::Wait);
    assert!(is_413(exchange.take(piece(b"0", false))));
    assert_eq!(exchange.held_bytes(), 0);
    assert_eq!(exchange.take(piece(b"more", true)), Step::Wait, "after an immediate response nothing is said");
    assert!(exchange.complete());

    let mut exchange = Exchange::new(10);
    let long = start_with(&[(":path", "/v1/completions"), ("content-length", "11")], false, BodyMode::Duplex);
    assert!(is_413(exchange.take(long)));
}

#[test]
fn a_refusal_is_the_whole_answer() {
    for mode in [BodyMode::Duplex, BodyMode::Buffered] {
        let mut exchange = Exchange::new(1 << 20);
        exchange.take(start(false, mode));
        asked(exchange.take(piece(b"no json", true)));
        let refusal = Refusal::bad_body("no".into());
        assert_eq!(exchange.decided(Verdict::Refuse(refusal.clone())), [Reply::Immediate(refusal)]);
        assert!(exchange.complete());
    }
}

#[test]
fn a_rank_is_set_and_then_not_removed() {
    let mut exchange = Exchange::new(1 << 20);
    asked(exchange.take(start(true, BodyMode::Duplex)));
    let replies =
        exchange.decided(Verdict::Go { destination: "1.1.1.1:1".into(), rank: Some(3), request_id: String::new() });
    let [Reply::RequestHeaders(Some(choice))] = replies.as_slice() else { panic!("{replies:?}") };
    assert!(choice.set.contains(&(RANK, "3".into())) && !choice.remove.contains(&RANK));
}

#[test]
fn responses_pass_unchanged_in_their_own_mode() {
    let mut exchange = Exchange::new(1 << 20);
    asked(exchange.take(start(true, BodyMode::Duplex)));
    exchange.decided(go());
    assert_eq!(exchange.take(Part::ResponseHeaders), Step::Send(vec![Reply::ResponseHeaders]));
    let event = Bytes::from_static(b"data: {}\n\n");
    let part = Part::ResponseBody { bytes: event.clone(), end_of_stream: false };
    assert_eq!(exchange.take(part), Step::Send(vec![Reply::ResponsePiece { bytes: event, end_of_stream: false }]));
    assert_eq!(exchange.take(Part::ResponseTrailers), Step::Send(vec![Reply::ResponseTrailers]));

    let mut exchange = Exchange::new(1 << 20);
    asked(exchange.take(start(true, BodyMode::Buffered)));
    exchange.decided(go());
    let part = Part::ResponseBody { bytes: Bytes::new(), end_of_stream: true };
    assert_eq!(exchange.take(part), Step::Send(vec![Reply::ResponseBody]));
}

#[test]
fn nonsense_fails_the_stream_instead_of_ending_it() {
    assert!(matches!(Exchange::new(1).take(piece(b"", true)), Step::Fail(_)));
    assert!(matches!(Exchange::new(1).take(Part::RequestTrailers), Step::Fail(_)));
    let mut exchange = Exchange::new(1 << 20);
    exchange.take(start(false, BodyMode::Duplex));
    assert!(matches!(exchange.take(start(false, BodyMode::Duplex)), Step::Fail(_)));
}

#[test]
fn a_stream_can_be_abandoned_until_it_is_answered() {
    let mut exchange = Exchange::new(1 << 20);
    exchange.take(start(false, BodyMode::Duplex));
    assert_eq!(exchange.abandon(Refusal::shed()), Some(Reply::Immediate(Refusal::shed())));
    assert_eq!(exchange.abandon(Refusal::shed()), None);
    let mut exchange = Exchange::new(1 << 20);
    asked(exchange.take(start(true, BodyMode::Duplex)));
    exchange.decided(go());
    assert_eq!(exchange.abandon(Refusal::stopping()), None);
}

#[test]
fn long_ids_of_clients_are_forgotten() {
    let mut exchange = Exchange::new(1);
    let long = "x".repeat(MAX_CLIENT_ID_BYTES + 1);
    let part = start_with(&[(":path", "/"), (REQUEST_ID, &long)], true, BodyMode::Duplex);
    assert_eq!(asked(exchange.take(part)).client_id, None);
}
