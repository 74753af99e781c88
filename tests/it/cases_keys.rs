//! Class A of the faults that others met: keys that do not match. Each test is named after its row.

use crate::cases_engine::{SIZE, Stream, remove, store, store_array, tokens};
use crate::stock_world;
use proto::control::encode;
use proto::native::dialect::{Event, EventBatch};
use serde_json::{Value, json};

#[test]
fn a1_engine_hashes_are_opaque() {
    // Negative, beyond i64, and the 32 bytes of a sha256: names, and nothing else.
    for hash in [json!(-5), json!(u64::MAX), json!(0)] {
        let mut stream = Stream::new();
        stream.say(json!([store_array(json!([hash]), Value::Null, &tokens(0, 1))]));
        assert_eq!(stream.depths(&tokens(0, 1)), (1, 1), "{hash}");
        stream.say(json!([remove(json!([hash]), json!({}))]));
        assert_eq!(stream.depths(&tokens(0, 1)), (0, 0), "{hash}");
    }
    let digest = |first: u8| serde_bytes::ByteBuf::from((first..first + 32).collect::<Vec<u8>>());
    let mut stream = Stream::new();
    let nil = None::<u8>;
    let first = ("BlockStored", [digest(0)], nil, tokens(0, 1), SIZE, nil, "GPU");
    let second = ("BlockStored", [digest(100)], digest(0), tokens(4, 1), SIZE, nil, "GPU");
    stream.take(&encode(&(1.5, (first, second), 0)).expect("encodes"));
    assert_eq!(stream.depths(&tokens(0, 2)), (2, 2));
    // vLLM's own integer of that digest: its last 8 bytes. A stream that mixes both forms means one block.
    let number = u64::from_be_bytes(std::array::from_fn(|at| 124 + at as u8));
    stream.say(json!([remove(json!([number]), json!({}))]));
    assert_eq!(stream.depths(&tokens(0, 2)), (1, 1));
}

#[test]
fn a2_a4_a16_equal_tokens_are_one_key_whatever_the_engines_call_them() {
    // Two processes with hashes of their own, and one of them after a restart with yet others.
    let mut names = vec![];
    for base in [10u64, 0x8000_0000_0000_0000, 77] {
        let mut stream = Stream::new();
        stream.say(json!([store(json!([base, base + 1]), Value::Null, &tokens(0, 2), json!({}))]));
        let mut members = vec![];
        stream.0.residency().chains(|_, run| members.extend_from_slice(run));
        names.push(members);
    }
    assert_eq!(names[0].len(), 2);
    assert!(names.iter().all(|members| *members == names[0]), "{names:?}");
}

#[test]
fn a8_salts_never_share_a_block() {
    let mut stream = Stream::new();
    let salted =
        |hash: u64, salt: &str| store(json!([hash]), Value::Null, &tokens(0, 1), json!({"extra_keys": [[salt]]}));
    stream.say(json!([salted(1, "S")]));
    assert_eq!(
        [stream.gpu("", "S", &tokens(0, 1)), stream.gpu("", "T", &tokens(0, 1)), stream.gpu("", "", &tokens(0, 1))],
        [1, 0, 0]
    );
    stream.say(json!([salted(2, "T")]));
    assert_eq!([stream.gpu("", "S", &tokens(0, 1)), stream.gpu("", "T", &tokens(0, 1))], [1, 1]);
    // SGLang gives both tenants' blocks one hash: nothing tells them apart, so only what is certain is credited.
    let mut stream = Stream::new();
    stream.say(json!([salted(1, "S"), salted(1, "T")]));
    assert_eq!([stream.gpu("", "S", &tokens(0, 1)), stream.gpu("", "T", &tokens(0, 1))], [1, 0]);
    assert_eq!(stream.counted().contradicted, 1);
}

#[test]
fn a9_streams_of_sglang_are_read() {
    // Arrays without lora_name; maps with fields that vLLM does not have; both with what they lack.
    let mut stream = Stream::new();
    stream.say(json!([["BlockStored", [1], null, tokens(0, 1), SIZE, null]]));
    stream.say(json!([{"type": "BlockStored", "block_hashes": [2], "parent_block_hash": 1, "token_ids": tokens(4, 1),
                       "block_size": SIZE, "cache_salt": "untold"}]));
    assert_eq!(stream.depths(&tokens(0, 2)), (2, 2));
    // An adapter that is told by number alone is nobody's, and never the base model's.
    stream.say(json!([["BlockStored", [3], null, tokens(100, 1), SIZE, 7]]));
    assert_eq!((stream.depths(&tokens(100, 1)), stream.counted().unnamed_adapter), ((0, 0), 1));
}

#[test]
fn a10_what_is_no_whole_block_is_counted_and_passed_over() {
    let mut stream = Stream::new();
    stream
        .say(json!([{"type": "BlockStored", "block_hashes": [1, 2, 3, 4], "token_ids": [1, 2, 3], "block_size": 256},
                      store(json!([9]), Value::Null, &tokens(0, 1), json!({}))]));
    assert_eq!((stream.counted().unplaced, stream.depths(&tokens(0, 1))), (1, (1, 1)));
}

#[test]
fn a12_a_blocks_parent_is_the_block_before_it_in_its_event() {
    let mut stream = Stream::new();
    stream.say(json!([store(json!([1, 2, 3]), Value::Null, &tokens(0, 3), json!({}))]));
    assert_eq!(stream.depths(&tokens(0, 3)), (3, 3));
    stream.say(json!([remove(json!([2]), json!({}))]));
    assert_eq!((stream.depths(&tokens(0, 3)), stream.0.residency().resident()), ((1, 1), 2));
}

#[test]
fn a13_a_parent_of_zero_is_a_hash_like_any_other() {
    let mut stream = Stream::new();
    stream.say(json!([store(json!([1]), json!(0), &tokens(0, 1), json!({}))]));
    stream.say(json!([store(json!([2]), json!(0), &tokens(4, 1), json!({}))]));
    assert_eq!(
        (stream.depths(&tokens(0, 1)), stream.0.residency().resident(), stream.counted().parked),
        ((0, 0), 0, 2)
    );
}

/// The engine that these tests play packs as a real one does: a recorded event, packed again, is the recorded bytes.
#[test]
fn a14_the_played_engine_packs_as_a_real_one() {
    let first = include_str!("../golden/recordings/vllm-0.11.0.jsonl").lines().find(|line| line.contains("\"frames\""));
    let line: Value = serde_json::from_str(first.expect("a message")).expect("JSON");
    let hex = line["frames"].as_array().and_then(|frames| frames.last()?.as_str()).expect("a payload");
    let payload: Vec<u8> =
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex")).collect();
    let real = EventBatch::decode(&payload).expect("a batch");
    let [Event::Stored(stored)] = &real.events[..] else { panic!("{real:?}") };
    assert_eq!(stored.parent, None);
    let event = ("BlockStored", &stored.hashes, None::<u64>, &stored.tokens, stored.block_size, None::<u64>, "GPU");
    let packed = encode(&event).expect("encodes");
    assert_eq!(stock_world::batch(real.at, &[packed]), payload);
}
