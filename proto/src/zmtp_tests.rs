//! Tests of the ZMTP codec.

use super::*;

const LIMITS: Limits = Limits { frames: 3, bytes: 1000 };

/// Everything that a wire says about these bytes, given in pieces of this length.
fn said(wire: &mut Wire, bytes: &[u8], piece: usize) -> Result<Vec<Incoming>, Broken> {
    let mut out = vec![];
    for piece in bytes.chunks(piece) {
        wire.room().extend_from_slice(piece);
        while let Some(one) = wire.take()? {
            out.push(one);
        }
    }
    Ok(out)
}

fn open(kind: Kind, peer: Kind) -> Result<Wire, Broken> {
    let mut wire = Wire::new(kind, LIMITS);
    let opening = Wire::new(peer, LIMITS).opening();
    assert_eq!(said(&mut wire, &opening, 7)?, [Incoming::Ready]);
    Ok(wire)
}

#[test]
fn whatever_the_pieces_the_messages_are_the_same() -> Result<(), Broken> {
    let mut bytes = vec![];
    message(&mut bytes, &[b"topic", &[7; 300], b""]);
    bytes.extend(command("PING", b"\0\x01context"));
    message(&mut bytes, &[b"next"]);
    bytes.extend(subscription("kv"));
    let expected = [
        Incoming::Message(vec!["topic".into(), vec![7; 300].into(), Bytes::new()]),
        Incoming::Command { name: "PING".into(), body: (&b"\0\x01context"[..]).into() },
        Incoming::Message(vec!["next".into()]),
        Incoming::Message(vec!["\x01kv".into()]),
    ];
    for piece in [1, 2, 3, 8, 9, 64, 301, bytes.len()] {
        assert_eq!(said(&mut open(Kind::Sub, Kind::Pub)?, &bytes, piece)?, expected, "pieces of {piece}");
    }
    Ok(())
}

#[test]
fn socket_types_must_fit() {
    use Kind::{Dealer, Pub, Router, Sub};
    for one in [Pub, Sub, Router, Dealer] {
        for other in [Pub, Sub, Router, Dealer] {
            let fits = matches!((one, other), (Pub, Sub) | (Sub, Pub) | (Router | Dealer, Router | Dealer));
            assert_eq!(open(one, other).is_ok(), fits, "{one:?} {other:?}");
        }
    }
}

#[test]
fn other_protocols_are_told_apart() {
    let answer = |bytes: &[u8]| said(&mut Wire::new(Kind::Sub, LIMITS), bytes, 64);
    assert!(matches!(answer(&b"HTTP/1.1 400 Bad Request\r\n".repeat(4)), Err(Broken::NotOurs(_))));
    let opening = Wire::new(Kind::Pub, LIMITS).opening();
    let changed = |at: usize, value: u8| {
        let mut bytes = opening.clone();
        bytes[at] = value;
        answer(&bytes)
    };
    assert_eq!(answer(&opening), Ok(vec![Incoming::Ready]));
    assert!(matches!(changed(10, 2), Err(Broken::NotOurs(why)) if why.contains("version")));
    assert!(matches!(changed(12, b'C'), Err(Broken::NotOurs(why)) if why.contains("mechanism")));
    let mut early = opening[..64].to_vec();
    frame(&mut early, false, b"x");
    assert!(matches!(answer(&early), Err(Broken::NotOurs(why)) if why.contains("before")));
    let mut refused = opening[..64].to_vec();
    refused.extend(command("ERROR", b"\x02no"));
    assert!(matches!(answer(&refused), Err(Broken::NotOurs(why)) if why.contains("refused")));
}

#[test]
fn limits_end_the_connection_before_memory_is_taken() -> Result<(), Broken> {
    let mut wire = open(Kind::Sub, Kind::Pub)?;
    let mut giant = vec![];
    header(&mut giant, false, 1 << 60);
    let broken = said(&mut wire, &giant, 64);
    assert_eq!(broken, Err(Broken::TooLong { claimed: 1 << 60, limit: 1000 }));
    assert!(wire.reserved() < 1 << 20, "{}", wire.reserved());

    let mut parts = vec![];
    (0..4).for_each(|_| frame(&mut parts, true, &[7; 300]));
    let broken = said(&mut open(Kind::Sub, Kind::Pub)?, &parts, 64);
    assert_eq!(broken, Err(Broken::TooLong { claimed: 1200, limit: 1000 }), "all frames of a message count");

    let broken = said(&mut open(Kind::Sub, Kind::Pub)?, &[MORE, 0].repeat(4), 64);
    assert_eq!(broken, Err(Broken::TooMany(3)));

    let mut long = vec![];
    head(&mut long, COMMAND, MAX_COMMAND_BYTES + 1);
    assert!(matches!(said(&mut open(Kind::Sub, Kind::Pub)?, &long, 64), Err(Broken::TooLong { .. })));
    let cut = [COMMAND, 2, 9, b'P'];
    assert_eq!(said(&mut open(Kind::Sub, Kind::Pub)?, &cut, 64), Err(Broken::Cut));
    assert_eq!(said(&mut open(Kind::Sub, Kind::Pub)?, &[COMMAND, 0], 64), Err(Broken::Cut));
    Ok(())
}

#[test]
fn limits_may_be_raised_for_a_peer_that_is_known() -> Result<(), Broken> {
    let mut long = vec![];
    frame(&mut long, false, &[7; 2000]);
    let mut wire = open(Kind::Sub, Kind::Pub)?;
    wire.limit(Limits { frames: 3, bytes: 2000 });
    assert_eq!(said(&mut wire, &long, 99)?, [Incoming::Message(vec![vec![7; 2000].into()])]);
    wire.limit(LIMITS);
    assert_eq!(said(&mut wire, &long, 99), Err(Broken::TooLong { claimed: 2000, limit: 1000 }));
    Ok(())
}

#[test]
fn a_promise_of_much_reserves_little() -> Result<(), Broken> {
    let mut wire = Wire::new(Kind::Sub, Limits { frames: 3, bytes: 1 << 30 });
    said(&mut wire, &Wire::new(Kind::Pub, LIMITS).opening(), 64)?;
    let mut claim = vec![];
    header(&mut claim, false, 1 << 29);
    assert_eq!(said(&mut wire, &claim, 64)?, []);
    let _ = wire.room();
    assert!(wire.reserved() <= 2 * CHUNK, "{}", wire.reserved());
    Ok(())
}

#[test]
fn a_ping_is_answered_with_its_context() {
    assert_eq!(pong(b"PING", b"\0\x01context"), Some(command("PONG", b"context")));
    assert_eq!(pong(b"PING", b"\0"), Some(command("PONG", b"")));
    assert_eq!(pong(b"PING", &[3; 99]), Some(command("PONG", &[3; 16])));
    assert_eq!(pong(b"READY", b""), None);
}
