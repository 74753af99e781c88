//! Every dialect of the events, built byte by byte.

use super::*;
use serde::Serialize;

fn packed(value: impl Serialize) -> Vec<u8> {
    rmp_serde::to_vec(&value).expect("plain values encode")
}

/// `[1.5, events, 0]`, each event as bytes.
fn batch(events: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![0x93];
    out.extend(packed(1.5));
    out.push(0x90 | events.len() as u8);
    out.extend(events.concat());
    out.push(0);
    out
}

/// A map event from (name, value) pairs, with a wide header as msgspec writes it for structs of many fields.
fn map(fields: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut out = vec![0xde, 0, fields.len() as u8];
    for (name, value) in fields {
        out.extend(packed(name));
        out.extend(value);
    }
    out
}

fn one(event: Vec<u8>) -> Event {
    let mut batch = EventBatch::decode(&batch(&[event])).expect("a batch");
    assert_eq!((batch.unknown, batch.unreadable, batch.events.len()), (0, 0, 1));
    batch.events.remove(0)
}

fn stored_of(event: Vec<u8>) -> Stored {
    match one(event) {
        Event::Stored(stored) => *stored,
        other => panic!("{other:?}"),
    }
}

#[test]
fn arrays_of_every_length() {
    let nil = None::<u8>;
    let want = Stored {
        hashes: vec![7, u64::MAX],
        parent: None,
        tokens: vec![1, 2, 3, 151_644],
        block_size: 2,
        ..Stored::default()
    };
    let (hashes, tokens) = ([7, u64::MAX], [1, 2, 3, 151_644]);
    assert_eq!(stored_of(packed(("BlockStored", hashes, nil, tokens, 2, nil, "GPU"))), want);
    assert_eq!(stored_of(packed(("BlockStored", hashes, nil, tokens, 2, nil))), want);
    let full = packed((
        "BlockStored",
        hashes,
        5,
        tokens,
        2,
        1,
        "cpu",
        "ad",
        (("ad", "salt"), nil),
        1,
        "mla_attention",
        nil,
        "later",
    ));
    let want = Stored {
        parent: Some(5),
        adapter: Adapter::Named("ad".to_owned()),
        medium: Medium::Cpu,
        extras: Extras::Told(vec![vec![Key::Text("ad".to_owned()), Key::Text("salt".to_owned())], vec![]]),
        group: 1,
        kind: Some(GroupKind::Full),
        ..want
    };
    assert_eq!(stored_of(full), want);
    assert_eq!(
        one(packed(("BlockRemoved", [7], "GPU"))),
        Event::Removed(Removed { hashes: vec![7], ..Removed::default() })
    );
    let removed = Removed { hashes: vec![7], group: 3, ..Removed::default() };
    assert_eq!(one(packed(("BlockRemoved", [7], nil, 3))), Event::Removed(removed));
    assert_eq!(one(packed(["AllBlocksCleared"])), Event::Cleared(None));
}

#[test]
fn maps_in_any_order_with_fields_to_come() {
    let nil = || packed(None::<u8>);
    let event = map(&[
        ("session_id", packed("s")),
        ("block_hashes", packed([7])),
        ("token_ids", packed([1, 2])),
        ("type", packed("BlockStored")),
        ("parent_block_hash", nil()),
        ("block_size", packed(2)),
        ("lora_id", nil()),
        ("lora_name", nil()),
        ("medium", packed("GPU")),
        ("kv_cache_spec_kind", packed("sliding_window")),
        ("locality", packed("REMOTE")),
        ("lookahead_token_ids", packed([[3]])),
        ("to_come", packed(([1, 2], "x"))),
    ]);
    let want = Stored {
        hashes: vec![7],
        tokens: vec![1, 2],
        block_size: 2,
        kind: Some(GroupKind::Other),
        remote: true,
        lookahead: true,
        may_repeat: true,
        ..Stored::default()
    };
    assert_eq!(stored_of(event), want);
    assert_eq!(one(map(&[("type", packed("AllBlocksCleared"))])), Event::Cleared(None));
    let removed = map(&[
        ("type", packed("BlockRemoved")),
        ("block_hashes", packed([7, 8])),
        ("remaining_copy_counts", packed([1, 0])),
    ]);
    let want = Removed { hashes: vec![7, 8], remaining: Some(vec![1, 0]), ..Removed::default() };
    assert_eq!(one(removed), Event::Removed(want));
}

#[test]
fn one_block_has_one_name_in_every_form() {
    let digest: Vec<u8> = (0..32).collect();
    let tail = u64::from_be_bytes([24, 25, 26, 27, 28, 29, 30, 31]);
    let name = |bytes: &[u8]| match one(packed(("BlockRemoved", [serde_bytes::Bytes::new(bytes)], "GPU"))) {
        Event::Removed(removed) => removed.hashes[0],
        other => panic!("{other:?}"),
    };
    assert_eq!(name(&digest), tail);
    assert_eq!(name(&digest[16..]), tail);
    assert_eq!(name(&digest[24..]), tail);
    assert_eq!(name(&[digest.clone(), digest.clone()].concat()), tail);
    // Lengths that no known engine uses: opaque, and still told apart.
    assert_ne!(name(&digest[..20]), name(&[digest[1..20].to_vec(), vec![0]].concat()));
    assert_ne!(name(&[]), name(&[0]));
    match one(packed(("BlockRemoved", [-2i64], "GPU"))) {
        Event::Removed(removed) => assert_eq!(removed.hashes, [u64::MAX - 1]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn keys_in_every_form() {
    let salt = packed((("cache_salt", "s"),));
    let forms: [(Vec<u8>, Key); 7] = [
        (packed(("text",)), Key::Text("text".to_owned())),
        (packed((("img", -4),)), Key::Item("img".to_owned(), -4)),
        (packed((("mm", "img", 4),)), Key::Item("img".to_owned(), 4)),
        (packed((("lora", "ad", "/path"),)), Key::Adapter("ad".to_owned())),
        (salt, Key::Salt("s".to_owned())),
        (packed((serde_bytes::Bytes::new(&[1; 32]),)), Key::Opaque),
        (packed((7,)), Key::Opaque),
    ];
    for (bytes, key) in forms {
        let mut list = vec![0x91];
        list.extend(bytes);
        let event = map(&[
            ("type", packed("BlockStored")),
            ("block_hashes", packed([7])),
            ("token_ids", packed([1])),
            ("block_size", packed(1)),
            ("extra_keys", list),
        ]);
        assert_eq!(stored_of(event).extras, Extras::Told(vec![vec![key]]));
    }
    let odd = map(&[("type", packed("BlockStored")), ("block_hashes", packed([7])), ("extra_keys", packed(["flat"]))]);
    assert_eq!(stored_of(odd).extras, Extras::Unreadable);
}

#[test]
fn an_event_that_cannot_be_read_costs_only_itself() {
    let events = [
        packed(("BlockStored", [7], None::<u8>, [-1], 2)),
        packed(("BlockStored", [7], None::<u8>, [1u64 << 32], 2)),
        packed(("BlockStored", "no list")),
        packed(("BlockRemoved",)),
        packed("no event"),
        packed(Vec::<u8>::new()),
        packed(("PartialBlockMoved", 1)),
        map(&[("block_hashes", packed([7]))]),
        packed(("BlockRemoved", [9], "GPU")),
    ];
    let batch = EventBatch::decode(&batch(&events)).expect("a batch");
    assert_eq!((batch.unreadable, batch.unknown, batch.events.len()), (7, 1, 1));
    assert_eq!((batch.at, batch.rank), (1.5, Some(0)));
}

#[test]
fn what_is_no_batch_is_refused() {
    assert!(matches!(EventBatch::decode(&[]), Err(BadEvents::Shape(_))));
    assert!(matches!(EventBatch::decode(&packed(("a", [0; 0]))), Err(BadEvents::Shape(_))));
    assert!(matches!(EventBatch::decode(&packed((1.5,))), Err(BadEvents::Shape(_))));
    assert!(matches!(EventBatch::decode(&packed((1.5, vec![0u8; 65_537]))), Err(BadEvents::TooManyEvents(65_537))));
    assert!(matches!(EventBatch::decode(&vec![0; (16 << 20) + 1]), Err(BadEvents::TooLong(_))));
    let wide = packed(("BlockStored", vec![0u8; 1 << 21], None::<u8>, vec![0u8; (1 << 21) + 1], 1));
    assert!(matches!(EventBatch::decode(&batch(&[wide])), Err(BadEvents::TooManyParts)));
    // A batch cut anywhere is refused, never misread.
    let whole = batch(&[packed(("BlockStored", [7, 8], None::<u8>, [1, 2], 1)), packed(["AllBlocksCleared"])]);
    for end in 0..whole.len() {
        assert!(EventBatch::decode(&whole[..end]).is_err(), "cut at {end}");
    }
}

#[test]
fn media_by_any_name() {
    for (name, medium) in [
        ("GPU", Medium::Gpu),
        ("gpu", Medium::Gpu),
        ("CPU", Medium::Cpu),
        ("CPU_PINNED", Medium::Cpu),
        ("CPU_TIER1", Medium::Cpu),
        ("host", Medium::Cpu),
        ("STORAGE", Medium::Storage),
        ("disk", Medium::Storage),
        ("gpuish", Medium::Unknown),
        ("", Medium::Unknown),
    ] {
        assert_eq!(Medium::from_name(name), medium, "{name}");
    }
}

#[test]
fn an_adapter_told_by_number_is_unnamed() {
    let event =
        |name: Option<&str>| stored_of(packed(("BlockStored", [7], None::<u8>, [1], 1, 3, "GPU", name))).adapter;
    assert_eq!(event(None), Adapter::Unnamed);
    assert_eq!(event(Some("ad")), Adapter::Named("ad".to_owned()));
}
