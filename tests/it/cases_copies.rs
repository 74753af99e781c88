//! Classes D and E of the faults that others met: copies, removals, and memory that grows. Named after their rows.

use crate::cases_engine::{SIZE, Stream, prompt, remove, store, store_array, tokens};
use index::shared::{Limits as Room, open};
use proto::control::encode;
use proto::id::SetKind;
use proto::native::dialect::EventBatch;
use proto::native::engine::{Limits, NativeEngine};
use serde_json::{Value, json};

#[test]
fn d1_a_block_stays_while_a_copy_is_left() {
    let mut stream = Stream::new();
    let two = || json!([store_array(json!([1]), Value::Null, &tokens(0, 1))]);
    stream.say(two()).say(two());
    stream.say(json!([remove(json!([1]), json!({}))]));
    assert_eq!(stream.depths(&tokens(0, 1)), (1, 1));
    stream.say(json!([remove(json!([1]), json!({}))]));
    assert_eq!(stream.depths(&tokens(0, 1)), (0, 0));
    // An engine that says how many are left is believed.
    stream.say(two()).say(two());
    stream.say(json!([remove(json!([1]), json!({"remaining_copy_counts": [0]}))]));
    assert_eq!(stream.depths(&tokens(0, 1)), (0, 0));
}

#[test]
fn d2_overlapping_offloaded_chunks_are_counted() {
    let mut stream = Stream::new();
    stream.say(json!([store(json!([1, 2, 3]), Value::Null, &tokens(0, 3), json!({}))]));
    let offload = |hashes: Value| {
        json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": null, "token_ids": [],
               "block_size": 0, "lora_id": null, "medium": "CPU", "lora_name": null})
    };
    stream.say(json!([offload(json!([1, 2])), offload(json!([2, 3]))]));
    stream.say(json!([remove(json!([3, 2, 1]), json!({}))]));
    assert_eq!(stream.depths(&tokens(0, 3)), (0, 3));
    stream.say(json!([remove(json!([1, 2]), json!({"medium": "CPU"}))]));
    assert_eq!((stream.depths(&tokens(0, 3)), stream.0.any().map(|any| any.resident())), ((0, 0), Some(2)));
    // Removals of what is not known pass.
    stream.say(json!([remove(json!([9, 9]), json!({})), remove(json!([9]), json!({"medium": "CPU"}))]));
    assert_eq!(stream.counted().unknown_removed, 3);
}

#[test]
fn d4_a_store_that_comes_again_counts_no_block_twice() {
    let mut stream = Stream::new();
    for _ in 0..5 {
        stream.say(json!([store(json!([1, 2]), Value::Null, &tokens(0, 2), json!({}))]));
    }
    let set = stream.0.residency();
    assert_eq!((set.resident(), set.reachable(), stream.counted().repeated), (2, 2, 8));
}

#[test]
fn d5_a_hash_twice_in_one_event_costs_that_event_alone() {
    let mut stream = Stream::new();
    stream.say(json!([
        store(json!([1]), Value::Null, &tokens(0, 1), json!({})),
        store(json!([2, 2]), json!(1), &tokens(4, 2), json!({})),
        store(json!([3]), json!(1), &tokens(50, 1), json!({}))
    ]));
    assert_eq!((stream.0.residency().reachable(), stream.counted().circular, stream.counted().cleared), (2, 1, 0));
}

#[test]
fn d6_a_removal_is_its_senders() -> Result<(), index::shared::Refused> {
    let (mut writer, mut reader) = open(Room::default());
    let chain = prompt("", "", &tokens(0, 3));
    for engine in 0..2 {
        let holder = writer.open(engine, SetKind::Gpu)?;
        writer.store(holder, &chain)?;
        writer.publish(holder)?;
    }
    let first = writer.live(0, SetKind::Gpu).expect("live");
    // Again and again: nothing goes below nothing.
    for _ in 0..3 {
        writer.remove(first, &chain)?;
    }
    let answer: Vec<(u32, u32)> = reader.find(&chain).iter().map(|(holder, depth)| (holder.engine, depth)).collect();
    assert_eq!(answer, [(1, 3)]);
    assert_eq!((writer.digest(first)?.count, writer.stats().used), (0, 3));
    Ok(())
}

#[test]
fn d8_a_removal_without_a_reason_is_taken_as_gone() {
    let mut stream = Stream::new();
    stream.say(json!([store(json!([1]), Value::Null, &tokens(0, 1), json!({}))]));
    // Moved down or evicted: it does not say where, so it is believed nowhere until a store says so.
    stream.say(json!([["BlockRemoved", [1]]]));
    assert_eq!(stream.depths(&tokens(0, 1)), (0, 0));
    stream.say(json!([store(json!([1]), Value::Null, &tokens(0, 1), json!({"medium": "CPU"}))]));
    assert_eq!(stream.depths(&tokens(0, 1)), (0, 1));
}

#[test]
fn e1_e2_nodes_follow_the_blocks_that_live() {
    // Prefixes that share and part: what is gone leaves no branch behind.
    let mut stream = Stream::new();
    for round in 0..200u32 {
        let mut prompt = tokens(0, 2);
        prompt.extend(tokens(1000 + 100 * round, 3));
        let hashes: Vec<u64> = [1, 2].into_iter().chain((0..3).map(|at| u64::from(10 + 3 * round + at))).collect();
        stream.say(json!([store_array(json!(hashes), Value::Null, &prompt)]));
        stream.say(json!([remove(json!(hashes), json!({}))]));
        let set = stream.0.residency();
        assert_eq!((set.resident(), set.nodes(), stream.0.unnamed()), (0, 0, 0), "round {round}");
    }
}

#[test]
fn e5_a_block_may_have_any_number_of_holders() -> Result<(), index::shared::Refused> {
    let (mut writer, mut reader) = open(Room::default());
    let chain = prompt("", "", &tokens(0, 4));
    for engine in 0..1024 {
        let holder = writer.open(engine, SetKind::Gpu)?;
        writer.store(holder, &chain)?;
        writer.publish(holder)?;
    }
    let answer = reader.find(&chain);
    assert_eq!(answer.iter().filter(|(_, depth)| *depth == 4).count(), 1024);
    Ok(())
}

#[test]
fn e4_e6_e8_e9_every_table_has_a_cap_where_blocks_come_in() {
    const CAP: Limits = Limits { blocks: 100, parked_tokens: 200 };
    let mut engine = NativeEngine::new("tiny", 1, CAP);
    // An engine that never removes; every other block hangs on something unheard.
    for round in 0..1000u64 {
        let parent = if round % 2 == 0 { Value::Null } else { json!(1 << 40 | round) };
        let event = store(json!([3 * round + 1, 3 * round + 2]), parent, &tokens(8 * round as u32, 2), json!({}));
        let lower = json!({"type": "BlockStored", "block_hashes": [3 * round + 1], "token_ids": [], "block_size": 0,
                           "medium": "cpu"});
        let payload = encode(&json!([1.5, [event, lower], 0])).expect("JSON encodes");
        engine.apply(EventBatch::decode(&payload).expect("a batch"), &mut vec![]);
        assert!(engine.residency().resident() + engine.unnamed() <= 100, "round {round}");
        assert!(engine.parked_tokens() <= 200, "round {round}");
        assert!(engine.any().is_none_or(|any| any.resident() <= 100), "round {round}");
    }
    assert!(engine.counters().over_limit > 1000);
    assert_eq!(SIZE, 4, "the numbers above are of blocks of four tokens");
}
