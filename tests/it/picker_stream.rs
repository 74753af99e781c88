//! What Envoy sends and what it must get, over a real gRPC stream.

use crate::picker_world::{FLEET, completion, until, world};
use anyhow::{Context, Result};
use harness::edge::fake_envoy::{Hint, Immediate, body, headers, post, trailers};
use picker::exchange::PIECE_BYTES;
use proto::wire::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use proto::wire::envoy::service::ext_proc::v3::ProcessingRequest;
use std::time::Duration;

const DUPLEX: BodySendMode = BodySendMode::FullDuplexStreamed;
const POOL: [&str; 3] = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"];

fn immediate(status: i32, reason: &str) -> Option<Immediate> {
    Some(Immediate { status, reason: reason.into(), code: reason.into() })
}

fn pieces(path: &str, whole: &[u8], size: usize) -> Vec<ProcessingRequest> {
    let mut messages = vec![post(path, "mine")];
    messages.extend(whole.chunks(size).map(|chunk| body(chunk, false)));
    messages.push(body(b"", true));
    messages
}

#[tokio::test]
async fn bodies_come_back_byte_for_byte_in_pieces_that_proxies_take() -> Result<()> {
    let world = world(FLEET).await?;
    for (length, size) in [(2 << 20, 128 << 10), (2 << 20, 16 << 10), (PIECE_BYTES, 1000), (PIECE_BYTES + 1, 70_000)] {
        // Not JSON and no path that is read: whatever it is, it must arrive.
        let whole: Vec<u8> = (0..length).map(|i| (i * 7 % 256) as u8).collect();
        let answer = world.envoy.request(pieces("/v1/embeddings", &whole, size)).await?;
        assert!(POOL.contains(&answer.destination()?));
        assert!(answer.body == whole, "{length} bytes in chunks of {size}");
        assert!(answer.ended && answer.pieces.iter().all(|p| *p <= PIECE_BYTES), "{:?}", answer.pieces);
        assert_eq!(answer.pieces.len(), usize::div_ceil(length, PIECE_BYTES));
    }
    until("bodies are let go", async || Ok(world.picker.buffered_bytes() == 0)).await
}

#[tokio::test]
async fn a_request_is_renamed_and_its_own_directions_are_dropped() -> Result<()> {
    let world = world(FLEET).await?;
    let list = [
        (":method", "POST"),
        (":path", "/v1/completions"),
        ("x-request-id", "mine"),
        ("x-gateway-destination-endpoint", "6.6.6.6:80"),
        ("x-gateway-destination-endpoint-subset", "6.6.6.6:80"),
        ("x-data-parallel-rank", "7"),
        ("x-gateway-inference-objective", "critical"),
    ];
    let json = completion(0..40).to_string();
    let messages = vec![headers(&list, false, DUPLEX, None), body(json.as_bytes(), true)];
    let answer = world.envoy.request(messages).await?;
    assert!(POOL.contains(&answer.destination()?));
    for name in &list[4..] {
        assert!(answer.removed.iter().any(|r| r == name.0), "{} in {:?}", name.0, answer.removed);
    }
    assert_eq!(answer.set.get("x-client-request-id").map(String::as_str), Some("mine"));
    let own = answer.set.get("x-request-id").context("no id")?;
    assert!(own != "mine" && proto::event::picker_request_id(own) == Some(own.as_str()));
    assert_eq!(world.decision("mine").await?["request_id"], own.as_str());
    assert_eq!(world.decision(own).await?["client_id"], "mine");
    Ok(())
}

#[tokio::test]
async fn ends_of_bodies_come_in_all_forms() -> Result<()> {
    let world = world(FLEET).await?;
    let json = completion(0..40).to_string().into_bytes();
    // Trailers are the end.
    let answer = world.envoy.request(vec![post("/v1/completions", "t"), body(&json, false), trailers()]).await?;
    assert!(answer.trailers && !answer.ended && answer.body == json);
    answer.destination()?;
    // The end is said twice, with the body again.
    let mut talk = world.envoy.open().await?;
    for message in [post("/v1/completions", "d"), body(&json, true), body(&json, true)] {
        talk.send(message).await?;
    }
    while !talk.step().await? {}
    assert!(talk.answer.body == json);
    assert_eq!(talk.close().await?.map(|s| s.code()), None, "nothing more is said, and the end is OK");
    // No body.
    let list = [(":method", "GET"), (":path", "/v1/models"), ("x-request-id", "g")];
    let answer = world.envoy.request(vec![headers(&list, true, DUPLEX, None)]).await?;
    assert!(POOL.contains(&answer.destination()?) && answer.pieces.is_empty());
    let placed = world.picker.in_flight();
    assert_eq!(placed, 2, "the two completions; a list of models enters no engine's queue");
    // An empty one.
    let answer = world.envoy.request(vec![post("/v1/embeddings", "e"), body(b"", true)]).await?;
    assert_eq!((answer.pieces.as_slice(), answer.ended), (&[0usize][..], true));
    Ok(())
}

#[tokio::test]
async fn buffered_mode_chooses_in_the_reply_to_the_body() -> Result<()> {
    let world = world(FLEET).await?;
    let list = [(":method", "POST"), (":path", "/v1/completions")];
    let json = completion(0..40).to_string();
    let mut talk = world.envoy.open().await?;
    talk.send(headers(&list, false, BodySendMode::Buffered, None)).await?;
    // Envoy waits for this before it sends the body.
    assert!(!talk.step().await?);
    assert_eq!((talk.answer.headers.as_slice(), &talk.answer.header), (&[false][..], &None));
    talk.send(body(json.as_bytes(), true)).await?;
    assert!(talk.step().await?);
    assert!(POOL.contains(&talk.answer.destination()?));
    assert_eq!((talk.answer.plain_bodies, talk.answer.pieces.len()), (1, 0));
    assert!(talk.close().await?.is_none());
    Ok(())
}

#[tokio::test]
async fn bad_and_long_bodies_are_refused() -> Result<()> {
    let world = world(&format!("{FLEET}body_limit_bytes: 100000\n")).await?;
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let answer = world.envoy.request(vec![post(path, "b"), body(b"no healthy upstream", true)]).await?;
        assert_eq!(answer.immediate, immediate(400, "bad_body"));
    }
    let answer = world.envoy.request(pieces("/v1/embeddings", &[b'x'; 100_001], 50_000)).await?;
    assert_eq!(answer.immediate, immediate(413, "too_large"));
    let answer = world.envoy.request(pieces("/v1/embeddings", &[b'x'; 100_000], 50_000)).await?;
    assert_eq!(answer.immediate, None);
    until("bodies are let go", async || Ok(world.picker.buffered_bytes() == 0)).await
}

#[tokio::test]
async fn too_many_bytes_at_once_are_shed() -> Result<()> {
    let world = world(&format!("{FLEET}body_limit_bytes: 1000\nbuffered_limit_bytes: 1500\n")).await?;
    let mut first = world.envoy.open().await?;
    first.send(post("/v1/embeddings", "1")).await?;
    first.send(body(&[b'x'; 1000], false)).await?;
    until("the first is held", async || Ok(world.picker.buffered_bytes() == 1000)).await?;
    let second = world.envoy.request(vec![post("/v1/embeddings", "2"), body(&[b'x'; 501], true)]).await?;
    assert_eq!(second.immediate, immediate(429, "shed"));
    let third = world.envoy.request(vec![post("/v1/embeddings", "3"), body(&[b'x'; 500], true)]).await?;
    assert_eq!(third.immediate, None);
    first.send(body(b"", true)).await?;
    while !first.step().await? {}
    assert_eq!(first.answer.body.len(), 1000);
    until("all is let go", async || Ok(world.picker.buffered_bytes() == 0)).await
}

#[tokio::test]
async fn without_engines_the_answer_is_503() -> Result<()> {
    let world = world("fleet: []").await?;
    let json = completion(0..40);
    assert_eq!(world.envoy.json("/v1/completions", "n", &json).await?.immediate, immediate(503, "no_endpoint"));
    let list = [(":method", "GET"), (":path", "/v1/models")];
    let answer = world.envoy.request(vec![headers(&list, true, DUPLEX, None)]).await?;
    assert_eq!(answer.immediate, immediate(503, "no_endpoint"));
    // A bad body is still the client's fault.
    let answer = world.envoy.request(vec![post("/v1/completions", "b"), body(b"{", true)]).await?;
    assert_eq!(answer.immediate, immediate(400, "bad_body"));
    Ok(())
}

#[tokio::test]
async fn the_pick_stays_inside_the_subset() -> Result<()> {
    let world = world(FLEET).await?;
    let list = [(":method", "POST"), (":path", "/v1/completions")];
    let ask = async |hint| {
        let json = completion(0..40).to_string();
        world.envoy.request(vec![headers(&list, false, DUPLEX, Some(hint)), body(json.as_bytes(), true)]).await
    };
    for hint in [
        Hint::List(vec!["10.0.0.3:8000"]),
        Hint::List(vec!["10.0.0.3:8000", "10.0.0.99:8000"]),
        Hint::List(vec![" 10.0.0.99:1 , 10.0.0.3:8000 "]),
        Hint::List(vec!["10.0.0.3:8000", "10.0.0.1:8001"]),
        Hint::Text(" 10.0.0.3:8000 "),
        Hint::Text("10.0.0.3"),
    ] {
        for _ in 0..5 {
            assert_eq!(ask(hint.clone()).await?.destination()?, "10.0.0.3:8000", "{hint:?}");
        }
    }
    for hint in [
        Hint::List(vec![]),
        Hint::List(vec!["10.0.0.99:8000"]),
        Hint::List(vec!["10.0.0.3:8001"]),
        Hint::Text(""),
        Hint::Text("nonsense"),
    ] {
        assert_eq!(ask(hint.clone()).await?.immediate, immediate(503, "no_endpoint"), "{hint:?}");
    }
    Ok(())
}

#[tokio::test]
async fn clients_that_leave_leave_nothing_behind() -> Result<()> {
    let world = world(FLEET).await?;
    for turn in 0..20 {
        let mut talk = world.envoy.open().await?;
        talk.send(post("/v1/completions", "gone")).await?;
        talk.send(body(&[b' '; 1000], false)).await?;
        if turn % 2 == 0 {
            talk.send(body(b"{\"prompt\":[1,2,3]}", false)).await?;
        }
        drop(talk);
    }
    until("bodies are let go", async || Ok(world.picker.buffered_bytes() == 0)).await?;
    assert_eq!(world.picker.in_flight(), 0);
    Ok(())
}

#[tokio::test]
async fn an_unanswered_stream_never_ends_with_ok() -> Result<()> {
    let world = world(FLEET).await?;
    let mut talk = world.envoy.open().await?;
    talk.send(post("/v1/completions", "half")).await?;
    talk.send(body(b"{", false)).await?;
    assert_eq!(talk.close().await?.map(|s| s.code()), Some(tonic::Code::Cancelled));
    let mut talk = world.envoy.open().await?;
    talk.send(body(b"{", true)).await?;
    assert_eq!(talk.close().await?.map(|s| s.code()), Some(tonic::Code::InvalidArgument));
    Ok(())
}

#[tokio::test]
async fn stopping_ends_what_is_answered_and_refuses_what_is_not() -> Result<()> {
    let mut world = world(FLEET).await?;
    let mut answered = world.envoy.open().await?;
    answered.send(post("/v1/embeddings", "done")).await?;
    answered.send(body(b"x", true)).await?;
    while !answered.step().await? {}
    let mut half = world.envoy.open().await?;
    half.send(post("/v1/embeddings", "half")).await?;
    half.send(body(b"x", false)).await?;
    until("the half is held", async || Ok(world.picker.buffered_bytes() == 1)).await?;
    let stopped = world.picker.stop_now(Duration::from_millis(300));
    let ends = async {
        let end = answered.close().await?;
        anyhow::ensure!(half.step().await?, "the half was not answered");
        anyhow::Ok((end, half.answer.immediate.clone()))
    };
    let ((), ends) = tokio::join!(stopped, ends);
    let (end, refused) = ends?;
    assert!(end.is_none(), "{end:?}");
    assert_eq!(refused, immediate(503, "stopping"));
    Ok(())
}
