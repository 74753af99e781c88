//! Classes F to I and P of the faults that others met: ranks, groups and sizes, adapters, images, dialects and tiers.
//! Each test is named after its rows.

use crate::cases_engine::{SIZE, Stream, prompt, remove, store, tokens};
use proto::native::dialect::EventBatch;
use proto::native::engine::lower;
use serde_json::{Value, json};

const FULL: &str = "full_attention";

#[test]
fn f8_tiers_are_walked_down_and_never_back_up() {
    let mut stream = Stream::new();
    let on = |medium: &str, hashes: Value, parent: Value, tokens: &[u32]| {
        json!([store(hashes, parent, tokens, json!({"medium": medium}))])
    };
    // GPU, host, GPU: the last one is behind a block that is not on the GPU.
    stream.say(on("GPU", json!([1]), Value::Null, &tokens(0, 1)));
    stream.say(on("CPU", json!([2]), json!(1), &tokens(4, 1)));
    stream.say(on("GPU", json!([3]), json!(2), &tokens(8, 1)));
    assert_eq!(stream.depths(&tokens(0, 3)), (1, 2));
    stream.say(on("STORAGE", json!([3]), json!(2), &tokens(8, 1)));
    assert_eq!(stream.depths(&tokens(0, 3)), (1, 3));
}

#[test]
fn g1_sparse_groups_feed_nothing() {
    let mut stream = Stream::new();
    let group = |group: u32, kind: &str| json!({"group_idx": group, "kv_cache_spec_kind": kind});
    stream.say(json!([store(json!([1, 2, 3]), Value::Null, &tokens(0, 3), group(0, "mla_attention"))]));
    // Windows skip blocks but not their tokens; one happens to look contiguous.
    stream.say(json!([store(json!([1, 3]), Value::Null, &tokens(0, 3), group(1, "sliding_window_mla"))]));
    stream.say(json!([store(json!([7, 8]), Value::Null, &tokens(100, 2), group(2, "sliding_window"))]));
    assert_eq!((stream.depths(&tokens(0, 3)), stream.depths(&tokens(100, 2))), ((3, 3), (0, 0)));
    assert_eq!((stream.counted().other_group, stream.0.mixed()), (2, true));
}

#[test]
fn g2_hashes_that_do_not_fit_the_tokens_are_not_placed() {
    let mut stream = Stream::new();
    stream.say(json!([
        store(json!([1, 2]), Value::Null, &tokens(0, 3), json!({})),
        store(json!([]), Value::Null, &tokens(0, 3), json!({}))
    ]));
    assert_eq!((stream.counted().unplaced, stream.0.residency().resident(), stream.0.unnamed()), (2, 0, 0));
}

#[test]
fn g4_the_block_size_is_the_events() {
    let mut stream = Stream::new();
    stream.say(json!([{"type": "BlockStored", "block_hashes": [1], "token_ids": tokens(0, 64), "block_size": 256}]));
    assert_eq!(stream.0.block_size(), Some(256));
}

#[test]
fn g5_an_engine_that_looks_ahead_is_said_to() {
    let mut stream = Stream::new();
    stream.say(json!([store(json!([1]), Value::Null, &tokens(0, 1), json!({"lookahead_token_ids": [[9]]}))]));
    // Its hits are shorter than its set: the link credits nothing and says why.
    assert!(stream.0.lookahead());
}

#[test]
fn g6_a_removal_of_another_group_leaves_the_attention_block() {
    let mut stream = Stream::new();
    let group = |group: u32, kind: &str| json!({"group_idx": group, "kv_cache_spec_kind": kind});
    stream.say(json!([store(json!([1]), Value::Null, &tokens(0, 1), group(0, FULL))]));
    stream.say(json!([store(json!([1]), Value::Null, &tokens(0, 1), group(1, "mamba"))]));
    stream.say(json!([remove(json!([1]), json!({"group_idx": 1}))]));
    assert_eq!(stream.depths(&tokens(0, 1)), (1, 1));
    stream.say(json!([remove(json!([1]), json!({"group_idx": 0}))]));
    assert_eq!(stream.depths(&tokens(0, 1)), (0, 0));
}

#[test]
fn g8_a_partial_entry_waits_for_its_parent_and_never_becomes_a_root() {
    let mut stream = Stream::new();
    let fine = json!({"type": "BlockStored", "block_hashes": [90], "parent_block_hash": 89, "token_ids": [8, 9],
                      "block_size": 2});
    stream.say(json!([store(json!([1, 2]), Value::Null, &tokens(0, 2), json!({})), fine.clone()]));
    assert_eq!((stream.counted().other_size, stream.depths(&tokens(0, 2))), (1, (2, 2)));
    // Also when it is the first thing that is heard: it does not decide the size of the blocks that count.
    let mut stream = Stream::new();
    stream.say(json!([fine]));
    assert_eq!(stream.0.residency().resident(), 0);
    stream.say(json!([store(json!([1, 2]), Value::Null, &tokens(0, 2), json!({}))]));
    assert_eq!((stream.0.block_size(), stream.depths(&tokens(0, 2))), (Some(SIZE as u32), (2, 2)));
}

#[test]
fn g9_g10_every_block_size_has_its_own_chain() {
    // No canonical size: what an engine of 8 holds says nothing about one of 4, and no tail is lost to rounding.
    let mut of_eight = Stream::new();
    of_eight.say(json!([{"type": "BlockStored", "block_hashes": [1], "token_ids": tokens(0, 2), "block_size": 8}]));
    let mut of_four = Stream::new();
    of_four.say(json!([store(json!([1, 2, 3]), Value::Null, &tokens(0, 3), json!({}))]));
    assert_eq!((of_eight.depths(&tokens(0, 2)), of_four.depths(&tokens(0, 3))), ((0, 0), (3, 3)));
    of_four.say(json!([remove(json!([3]), json!({}))]));
    assert_eq!(of_four.depths(&tokens(0, 3)), (2, 2));
}

#[test]
fn h1_h2_adapters_are_told_apart_by_name() {
    let mut stream = Stream::new();
    let with = |hash: u64, id: Value, name: Value, keys: Value| {
        let more = json!({"lora_id": id, "lora_name": name, "extra_keys": [keys]});
        json!([store(json!([hash]), Value::Null, &tokens(0, 1), more)])
    };
    let depths = |stream: &Stream| ["", "x", "y"].map(|adapter| stream.gpu(adapter, "", &tokens(0, 1)));
    stream.say(with(1, Value::Null, Value::Null, Value::Null));
    assert_eq!(depths(&stream), [1, 0, 0]);
    stream.say(with(2, json!(1), json!("x"), json!(["x"])));
    assert_eq!(depths(&stream), [1, 1, 0]);
    // Loaded in another order elsewhere: the number says nothing.
    let mut other = Stream::new();
    other.say(with(2, json!(7), json!("x"), json!(["x"])));
    assert_eq!(depths(&other), [0, 1, 0]);
    other.say(with(3, json!(1), json!("y"), json!(["y"])));
    assert_eq!(depths(&other), [0, 1, 1]);
}

#[test]
fn h4_fields_to_come_are_passed_over() {
    let mut stream = Stream::new();
    let more = json!({"lora_path": "/m", "nested": {"a": [1, {"b": null}]}, "session_id": "s", "ownership": "SHARED"});
    stream.say(json!([store(json!([1]), Value::Null, &tokens(0, 1), more)]));
    stream.say(json!([[
        "BlockStored",
        [2],
        1,
        tokens(4, 1),
        SIZE,
        null,
        "GPU",
        null,
        null,
        0,
        null,
        null,
        "LOCAL",
        "new",
        5,
        {}
    ]]));
    assert_eq!(stream.depths(&tokens(0, 2)), (2, 2));
}

/// Blocks of a prompt that holds one image, which starts in its second block.
fn image(stream: &mut Stream, hashes: [u64; 3], identifier: &str) {
    let keys = json!([null, [[identifier, 2]], [[identifier, -2]]]);
    let event = store(json!(hashes), Value::Null, &tokens(0, 3), json!({"extra_keys": keys}));
    stream.say(json!([event]));
}

#[test]
fn i1_i2_i5_images_part_where_they_begin() {
    let (mut stream, mut names) = (Stream::new(), vec![]);
    for (identifier, base) in [("image:cat", 10), ("image:dog", 20), ("audio:cat", 30)] {
        image(&mut stream, [1, base + 1, base + 2], identifier);
        let root = prompt("", "", &tokens(0, 1))[0];
        let extra = |offset| [proto::block::Extra { identifier, offset }];
        let second = proto::block::next(root, &tokens(4, 1), &extra(2));
        names.push([second, proto::block::next(second, &tokens(8, 1), &extra(-2))]);
    }
    let set = stream.0.residency();
    // The text before it is shared; the picker computes the same names from identifier and offset.
    assert_eq!((set.reachable(), stream.0.unnamed()), (7, 0));
    assert!(names.as_flattened().iter().all(|fp| set.is_reachable(*fp)));
    // No text prompt meets them.
    assert_eq!(stream.depths(&tokens(0, 3)), (1, 1));
}

#[test]
fn i4_text_to_a_model_that_sees_is_text() {
    let mut stream = Stream::new();
    stream.say(json!([store(json!([1, 2]), Value::Null, &tokens(0, 2), json!({"extra_keys": [null, []]}))]));
    assert_eq!(stream.depths(&tokens(0, 2)), (2, 2));
}

#[test]
fn i6_identifiers_count_in_their_whole_length() {
    let mut stream = Stream::new();
    let padded = |digit: char| format!("{}{}", digit.to_string().repeat(16), "0".repeat(48));
    image(&mut stream, [1, 11, 12], &padded('a'));
    image(&mut stream, [1, 21, 22], &padded('b'));
    let low = |digit: char| format!("{}{}", "0".repeat(48), digit.to_string().repeat(16));
    image(&mut stream, [1, 31, 32], &low('a'));
    image(&mut stream, [1, 41, 42], &low('b'));
    assert_eq!((stream.0.residency().reachable(), stream.counted().hidden), (9, 0));
}

#[test]
fn p1_p2_arrays_maps_and_their_tails_are_one_stream() {
    let mut stream = Stream::new();
    let nil = Value::Null;
    // 0.10.2 with and without what came later; SGLang's short form; 0.24's maps. The outer batch is always an array.
    stream.say(json!([["BlockStored", [1], nil, tokens(0, 1), SIZE, nil, "GPU"]]));
    stream.say(json!([["BlockStored", [-7], 1, tokens(4, 1), SIZE, nil, "GPU", nil, nil, nil, nil, nil]]));
    stream.say(json!([["BlockStored", [3], -7, tokens(8, 1), SIZE]]));
    stream.say(json!([{"type": "BlockStored", "block_hashes": [4], "parent_block_hash": 3, "token_ids": tokens(12, 1),
                       "block_size": SIZE}, {"type": "BlockMoved", "why": 1}, ["BlockPinned", 1], 7, "x", {}]));
    assert_eq!(stream.depths(&tokens(0, 4)), (4, 4));
    let counted = stream.counted();
    assert_eq!((counted.stored, counted.unknown_event, counted.unreadable_event), (4, 2, 3));
    // Batches of two fields, and of more than three.
    let payload = proto::control::encode(&json!([2, [["AllBlocksCleared"]]])).expect("JSON encodes");
    assert_eq!(EventBatch::decode(&payload).map(|batch| (batch.events.len(), batch.rank)), Ok((1, None)));
    let payload = proto::control::encode(&json!([2, [["AllBlocksCleared"]], 3, {"to": "come"}])).expect("JSON encodes");
    assert_eq!(EventBatch::decode(&payload).map(|batch| (batch.events.len(), batch.rank)), Ok((1, Some(3))));
}

#[test]
fn p8_p9_media_by_any_name_and_never_taken_for_faster_ones() {
    for (medium, want) in [
        ("GPU", (1, 1)),
        ("gpu", (1, 1)),
        ("CPU", (0, 1)),
        ("cpu", (0, 1)),
        ("CPU_PINNED", (0, 1)),
        ("CPU_TIER1", (0, 1)),
        ("STORAGE", (0, 1)),
        ("Disk", (0, 1)),
        ("holographic", (0, 0)),
        ("", (0, 0)),
    ] {
        let mut stream = Stream::new();
        stream.say(json!([store(json!([1]), Value::Null, &tokens(0, 1), json!({"medium": medium}))]));
        assert_eq!(stream.depths(&tokens(0, 1)), want, "{medium:?}");
        assert_eq!(stream.counted().unknown_medium, u64::from(want == (0, 0)), "{medium:?}");
    }
}

#[test]
fn p10_p12_connectors_that_only_store_are_believed_for_a_while() {
    // LMCache: stores with tokens and a medium of its own choice, and never a removal.
    let mut stream = Stream::new();
    stream.0.tick(0);
    stream.say(json!([store(json!([1, 2]), Value::Null, &tokens(0, 2), json!({"medium": "cpu"}))]));
    assert_eq!(stream.depths(&tokens(0, 2)), (0, 2));
    stream.0.tick(lower::ADVISORY_MS);
    assert_eq!((stream.depths(&tokens(0, 2)), stream.counted().expired), ((0, 0), 2));
}
