//! Tests of the delta codec.

use super::*;
use crate::digest::Digest;

/// A heartbeat with every field filled.
pub(crate) fn state() -> State {
    State {
        engine: EngineId::new("a", 0),
        dp_size: 2,
        address: "10.0.0.7:8000".into(),
        rank_header: Some(1),
        models: vec!["tiny".into(), "alias".into()],
        block_size: 16,
        check: 9,
        rule: HitRule::Closed,
        groups: vec![Group { kind: "full_attention".into(), block_size: 16, window: 0 }],
        digests: vec![KindDigest { kind: SetKind::Gpu, digest: Digest::from_iter([1, 2]) }],
        running: 1,
        waiting: 2,
        backlog_tokens: 3,
        kv_use: 0.5,
        max_num_seqs: 8,
        total_blocks: 100,
        unnamed: 0,
        adapters: vec!["x".into()],
        adapters_running: vec!["x".into()],
        adapters_waiting: vec!["y".into()],
        adapters_cached: vec!["z".into()],
        max_adapters: 0,
        steps: 7,
        stalled_ms: 0,
        gpu_utilization: None,
        gpus: Some(Gpus { count: 2, memory_use: 0.9, throttled: vec!["thermal".into()], ..Gpus::default() }),
        health: 0.8,
        ailments: vec!["gpu_throttled".into()],
        draining: false,
        asleep: false,
        agent: "0.1.0".into(),
        engine_version: "0.32.0".into(),
        bundle: String::new(),
        counters: Counters::default(),
    }
}

fn batch(ops: Vec<Op>) -> Batch {
    Batch { version: PROTOCOL, epoch: Epoch { start_ms: 1, random: u64::MAX }, step_ms: 5, ops }
}

#[test]
fn everything_round_trips() -> Result<(), Box<dyn std::error::Error>> {
    let all = batch(vec![
        Op::Store(Store {
            kind: SetKind::Gpu,
            parent: Parent::Root { fp: 7, model: "tiny".into(), adapter: String::new() },
            fingerprints: Fingerprints(vec![1, u64::MAX]),
        }),
        Op::Store(Store { kind: SetKind::S1, parent: Parent::Loose, fingerprints: Fingerprints(vec![4]) }),
        Op::Remove(Remove { kind: SetKind::Any, fingerprints: Fingerprints(vec![4, 3]) }),
        Op::Clear(Clear { kind: None }),
        Op::Clear(Clear { kind: Some(SetKind::Gpu) }),
        Op::State(Box::new(state())),
        Op::Life(Life::Started { id: "x".into(), prompt_tokens: 9, cached_tokens: 0, predicted_tokens: None, seq: 3 }),
        Op::Life(Life::Finished { id: "x".into(), reason: "stop".into() }),
    ]);
    assert_eq!(Batch::decode(&all.encode()?)?, all);
    Ok(())
}

#[test]
fn fields_of_a_later_version_are_ignored() -> Result<(), Box<dyn std::error::Error>> {
    #[derive(Serialize)]
    struct Later {
        v: u16,
        e: Epoch,
        t: u64,
        o: Vec<Op>,
        new: &'static str,
    }
    let later = Later { v: PROTOCOL, e: Epoch::default(), t: 0, o: vec![], new: "field" };
    assert_eq!(Batch::decode(&rmp_serde::to_vec_named(&later)?)?.ops, vec![]);
    Ok(())
}

#[test]
fn nonsense_is_refused() -> Result<(), Box<dyn std::error::Error>> {
    assert!(matches!(Batch::decode(&vec![0; MAX_PAYLOAD_BYTES + 1]), Err(BadBatch::TooLong(_))));
    assert!(matches!(Batch::decode(b"nonsense"), Err(BadBatch::Codec(_))));
    assert!(matches!(Batch::decode(&Batch { version: 9, ..batch(vec![]) }.encode()?), Err(BadBatch::Version(9))));
    let zero = batch(vec![Op::Remove(Remove { kind: SetKind::Gpu, fingerprints: Fingerprints(vec![0]) })]);
    assert!(matches!(Batch::decode(&zero.encode()?), Err(BadBatch::Codec(_))));
    let long = batch(vec![Op::Life(Life::Arrived { id: "x".repeat(MAX_TEXT_BYTES + 1) })]);
    assert!(matches!(Batch::decode(&long.encode()?), Err(BadBatch::Limit("request id"))));
    let nan = batch(vec![Op::State(Box::new(State { kv_use: f32::NAN, ..state() }))]);
    assert!(matches!(Batch::decode(&nan.encode()?), Err(BadBatch::Limit(_))));
    Ok(())
}

#[test]
fn a_pickers_id_is_found_in_what_the_engine_makes_of_it() {
    let id = "0f8fad5b-d9cb-469f-a165-70867728950e";
    for wrapped in [
        id.to_string(),
        format!("chatcmpl-{id}"),
        format!("cmpl-{id}-0"),
        format!("cmpl-{id}-0-1a2b3c4d"),
        format!("1_chatcmpl-{id}-1a2b3c4d"),
    ] {
        assert_eq!(picker_request_id(&wrapped), Some(id), "{wrapped}");
    }
    assert_eq!(picker_request_id("chatcmpl-abdcbb0d3d8e6381"), None);
    assert_eq!(picker_request_id("é0f8fad5b"), None);
}
