//! What the corpus of `tests/fuzz` begins with: payloads of real engines and one small case of every dialect.
//!
//! `cargo run -p harness --bin seeds` writes them; a test says when they are no longer what is in the repository.

use proto::control::{self, Request};
use proto::event::{Batch, Clear, Fingerprints, Life, Op, Parent, Remove, Store};
use proto::id::{Epoch, SetKind};
use proto::zmtp::{self, Kind, Wire};
use serde::Serialize;

/// One file of the corpus.
#[derive(Debug)]
pub struct Seed {
    /// The target, which is its folder.
    pub target: &'static str,
    /// The file's name.
    pub name: String,
    /// The file.
    pub bytes: Vec<u8>,
}

/// The recordings of real engines, as the tests have them.
const RECORDINGS: [(&str, &str); 3] = [
    ("0.11.0", include_str!("../../golden/recordings/vllm-0.11.0.jsonl")),
    ("0.28.0", include_str!("../../golden/recordings/vllm-0.28.0.jsonl")),
    ("0.32.0", include_str!("../../golden/recordings/vllm-0.32.0.jsonl")),
];
/// Longest payload that becomes a seed: short ones are what a fuzzer works with.
const LONGEST: usize = 1200;

/// All seeds.
pub fn all() -> Vec<Seed> {
    let mut out = vec![];
    let mut seed = |target, name: String, bytes| out.push(Seed { target, name, bytes });
    for (version, text) in RECORDINGS {
        let (mut stream, mut taken) = (vec![], 0);
        for (at, frames) in text.lines().filter_map(frames_of).enumerate() {
            let Some(payload) = frames.last().filter(|payload| payload.len() <= LONGEST) else { continue };
            if taken < 12 {
                seed("native_batch", format!("vllm-{version}-{at}"), payload.clone());
                taken += 1;
            }
            if stream.len() < 6000 {
                stream.extend((payload.len() as u16).to_be_bytes());
                stream.extend(payload);
            }
        }
        seed("native_stream", format!("vllm-{version}"), stream);
    }
    for (name, events) in dialects() {
        seed("native_batch", name.to_string(), batch(&events));
        // Again and again, then gone, then the batch once more.
        let mut stream = vec![];
        for payload in [batch(&events), batch(&events), batch(&[packed(("AllBlocksCleared",))]), batch(&events)] {
            stream.extend((payload.len() as u16).to_be_bytes());
            stream.extend(payload);
        }
        seed("native_stream", name.to_string(), stream);
    }
    for (name, frames) in layouts() {
        let bytes = frames.iter().flat_map(|frame| [&[frame.len() as u8], *frame].concat()).collect();
        seed("native_frames", name.to_string(), bytes);
    }
    for (name, ops) in agent_ops() {
        let batch = Batch { version: 1, epoch: Epoch { start_ms: 5, random: 6 }, step_ms: 7, ops };
        seed("agent_batch", name.to_string(), batch.encode().expect("a batch encodes"));
    }
    for (name, request) in [
        ("replay", Request::Replay { from: 3 }),
        ("snapshot", Request::Snapshot { cut: None, piece: 0 }),
        ("bundle", Request::Bundle { digest: "ab".into(), offset: 9 }),
        ("ack", Request::Ack { reader: 1, epoch: Epoch { start_ms: 5, random: 6 }, next: 4 }),
    ] {
        seed("control", name.to_string(), packed(&request));
    }
    seed("control", "refused".into(), packed(control::Reply::Refused { reason: "no".into() }));
    for (name, deeds) in deeds() {
        seed("residency", name.to_string(), deeds);
    }
    for (name, kind, bytes) in wires() {
        for step in [1, 64] {
            seed("zmtp", format!("{name}-{step}"), [&[kind, step], &bytes[..]].concat());
        }
    }
    out
}

fn frames_of(line: &str) -> Option<Vec<Vec<u8>>> {
    let line: serde_json::Value = serde_json::from_str(line).ok()?;
    let frames = line.get("frames")?.as_array()?;
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    frames.iter().map(|frame| frame.as_str()?.as_bytes().chunks(2).map(byte).collect()).collect()
}

fn packed(value: impl Serialize) -> Vec<u8> {
    control::encode(&value).expect("a plain value encodes")
}

/// `[1.5, events, 0]`.
fn batch(events: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![0x93];
    out.extend(packed(1.5));
    out.push(0x90 | events.len() as u8);
    out.extend(events.concat());
    out.push(0);
    out
}

/// A map with a wide header, as msgspec writes it for structs of many fields.
fn map(fields: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut out = vec![0xde, 0, fields.len() as u8];
    for (name, value) in fields {
        out.extend(packed(name));
        out.extend(value);
    }
    out
}

fn bin(byte: u8, length: usize) -> Vec<u8> {
    let mut out = vec![0xc4, length as u8];
    out.extend(vec![byte; length]);
    out
}

/// One small case for everything that versions and engines write differently.
fn dialects() -> Vec<(&'static str, Vec<Vec<u8>>)> {
    let nil = None::<u8>;
    let store = |hashes: &[u64], parent: Option<u64>, tokens: &[u32]| {
        packed(("BlockStored", hashes, parent, tokens, 2, nil, "GPU"))
    };
    let first = || ("type", packed("BlockStored"));
    let plain =
        || [("block_hashes", packed([1u64, 2])), ("token_ids", packed([1, 2, 3, 4])), ("block_size", packed(2))];
    let with = |more: Vec<(&'static str, Vec<u8>)>| map(&[vec![first()], plain().to_vec(), more].concat());
    vec![
        ("array-0.10", vec![store(&[1, 2], None, &[1, 2, 3, 4]), packed(("BlockRemoved", [2u64], "GPU"))]),
        ("array-0.17", vec![packed(("BlockStored", [1u64], nil, [1, 2], 2, nil, "GPU", "ad", [Some(["ad"])]))]),
        ("array-0.20", vec![packed(("BlockStored", [1u64], nil, [1, 2], 2, nil, "GPU", nil, nil, 1))]),
        ("array-short", vec![packed(("BlockStored", [1u64], nil, [1, 2], 2))]),
        ("array-long", vec![packed(("BlockRemoved", [1u64], "GPU", 0, "LOCAL", nil, "new", 5))]),
        ("map-0.24", vec![with(vec![("parent_block_hash", packed(nil)), ("medium", packed("GPU"))])]),
        ("map-kind", vec![with(vec![("group_idx", packed(1)), ("kv_cache_spec_kind", packed("mla_attention"))])]),
        ("map-window", vec![with(vec![("group_idx", packed(2)), ("kv_cache_spec_kind", packed("sliding_window"))])]),
        ("map-lookahead", vec![with(vec![("lookahead_token_ids", packed([[3], [5]]))])]),
        ("map-remote", vec![with(vec![("locality", packed("REMOTE"))])]),
        ("map-image", vec![with(vec![("extra_keys", packed([Some([("img", 0)]), None]))])]),
        ("map-salt", vec![with(vec![("extra_keys", packed([Some(["salt"]), None]))])]),
        ("map-unknown-field", vec![with(vec![("to_come", packed([[1, 2], [3, 4]]))])]),
        (
            "hash-bytes",
            vec![map(&[
                first(),
                ("block_hashes", [vec![0x92], bin(7, 32), bin(8, 16)].concat()),
                ("parent_block_hash", bin(9, 8)),
                ("token_ids", packed([1, 2, 3, 4])),
                ("block_size", packed(2)),
            ])],
        ),
        ("hash-negative", vec![packed(("BlockStored", [-5i64], nil, [1, 2], 2, nil))]),
        (
            "hash-mixed",
            vec![
                store(&[7], None, &[1, 2]),
                map(&[
                    ("type", packed("BlockRemoved")),
                    ("block_hashes", [vec![0x91], vec![0xc4, 8, 0, 0, 0, 0, 0, 0, 0, 7]].concat()),
                ]),
            ],
        ),
        ("orphans", vec![store(&[3], Some(2), &[5, 6]), store(&[2], Some(1), &[3, 4]), store(&[1], None, &[1, 2])]),
        ("twice", vec![store(&[1, 1], None, &[1, 2, 3, 4]), store(&[1], Some(1), &[1, 2])]),
        ("sparse", vec![store(&[1, 2], None, &[1, 2, 3, 4, 5, 6])]),
        (
            "tokenless",
            vec![
                store(&[1, 2], None, &[1, 2, 3, 4]),
                packed(("BlockStored", [1u64, 2], nil, [0u32; 0], 0, nil, "CPU")),
            ],
        ),
        (
            "lower",
            vec![packed(("BlockStored", [1u64], nil, [1, 2], 2, nil, "cpu")), packed(("BlockRemoved", [1u64], "CPU"))],
        ),
        (
            "media",
            vec![packed(("BlockStored", [1u64], nil, [1, 2], 2, nil, "HBF")), packed(("AllBlocksCleared", "GPU"))],
        ),
        (
            "copies",
            vec![
                store(&[1], None, &[1, 2]),
                map(&[
                    ("type", packed("BlockRemoved")),
                    ("block_hashes", packed([1u64])),
                    ("remaining_copy_counts", packed([1])),
                ]),
            ],
        ),
        ("number-adapter", vec![packed(("BlockStored", [1u64], nil, [1, 2], 2, 3, "GPU"))]),
        ("unknown-event", vec![packed(("BlockMoved", 1, 2)), store(&[1], None, &[1, 2])]),
        ("bad-event", vec![packed("no event"), packed(("BlockStored", "no hashes")), store(&[1], None, &[1, 2])]),
        ("no-type", vec![map(&plain()), packed([0u8; 0])]),
    ]
}

fn layouts() -> Vec<(&'static str, Vec<&'static [u8]>)> {
    const SEQ: &[u8] = &[0, 0, 0, 0, 0, 0, 1, 2];
    const END: &[u8] = &[255; 8];
    vec![
        ("live", vec![b"kv", SEQ, b"p"]),
        ("replay-0.25", vec![b"", SEQ, b"p"]),
        ("replay-0.26", vec![b"", b"kv", SEQ, b"p"]),
        ("end-0.25", vec![b"", END, b""]),
        ("end-0.26", vec![b"", b"", END, b""]),
        ("end-with-payload", vec![END, b"p"]),
        ("one", vec![b"p"]),
        ("no-seq", vec![b"kv", b"1234", b"p"]),
    ]
}

fn agent_ops() -> Vec<(&'static str, Vec<Op>)> {
    let heartbeat = serde_json::json!({
        "engine": "a.0", "models": ["m"], "block_size": 16, "check": 5, "digests": [],
        "running": 1, "waiting": 2, "kv_use": 0.5,
    });
    let clear = |kind| Op::Clear(Clear { kind });
    vec![
        ("empty", vec![]),
        ("clear", vec![clear(None), clear(Some(SetKind::Any))]),
        (
            "root",
            vec![Op::Store(Store {
                kind: SetKind::Gpu,
                parent: Parent::Root { fp: 9, model: "m".into(), adapter: "ad".into() },
                fingerprints: Fingerprints(vec![1, 2]),
            })],
        ),
        (
            "lives",
            vec![
                Op::Life(Life::Arrived { id: "cmpl-1".into() }),
                Op::Life(Life::Started {
                    id: "cmpl-1".into(),
                    prompt_tokens: 9,
                    cached_tokens: 4,
                    predicted_tokens: Some(4),
                    seq: 3,
                }),
                Op::Life(Life::Finished { id: "cmpl-1".into(), reason: "stop".into() }),
            ],
        ),
        ("state", vec![Op::State(Box::new(serde_json::from_value(heartbeat).expect("a heartbeat")))]),
        ("store", vec![store_op(SetKind::Gpu, vec![1, 2, u64::MAX])]),
        (
            "remove",
            vec![
                store_op(SetKind::S1, vec![5]),
                Op::Remove(Remove { kind: SetKind::S1, fingerprints: Fingerprints(vec![5]) }),
            ],
        ),
    ]
}

fn store_op(kind: SetKind, fingerprints: Vec<u64>) -> Op {
    Op::Store(Store { kind, parent: Parent::Loose, fingerprints: Fingerprints(fingerprints) })
}

fn deeds() -> Vec<(&'static str, Vec<u8>)> {
    // Every block follows the one before it.
    let before = |at: u8| if (at - 1).is_multiple_of(8) { 2 * at - 1 } else { at - 1 };
    let chain: Vec<u8> = (0..32u8).map(|at| if at == 0 { 0 } else { before(at) }).collect();
    let star = vec![8u8; 32];
    let with = |parents: &[u8], deeds: &[[u8; 2]]| [parents, deeds.as_flattened()].concat();
    let up: Vec<[u8; 2]> = (0..32).map(|at| [1, at]).collect();
    let down: Vec<[u8; 2]> = (0..32).rev().map(|at| [9, at]).collect();
    vec![
        ("chain-up-down", with(&chain, &[up.clone(), down.clone()].concat())),
        ("chain-head-first", with(&chain, &[up.clone(), down.iter().rev().copied().collect()].concat())),
        ("orphans", with(&chain, &[up.iter().rev().copied().collect(), up.clone(), down.clone()].concat())),
        ("roots", with(&star, &[up.clone(), vec![[0, 0]], up.clone()].concat())),
        ("self", with(&[255; 32], &up)),
        ("twice", with(&chain, &[[1, 0], [1, 0], [9, 0], [1, 1], [9, 0], [9, 0]])),
    ]
}

fn wires() -> Vec<(&'static str, u8, Vec<u8>)> {
    let limits = zmtp::Limits { frames: 4, bytes: 1000 };
    let opened = |theirs: Kind, rest: &[u8]| [&Wire::new(theirs, limits).opening()[..], rest].concat();
    let said = |frames: &[&[u8]]| {
        let mut out = vec![];
        zmtp::message(&mut out, frames);
        out
    };
    let long = |claimed: u64| [&[2u8][..], &claimed.to_be_bytes()].concat();
    vec![
        ("message", 1, opened(Kind::Pub, &said(&[b"topic", b"12345678", b"payload"]))),
        ("subscription", 0, opened(Kind::Sub, &zmtp::subscription("kv"))),
        ("ping", 1, opened(Kind::Pub, &zmtp::command("PING", b"\0\x01ab"))),
        ("asks", 2, opened(Kind::Dealer, &said(&[b"", b"12345678"]))),
        ("claims", 1, opened(Kind::Pub, &long(1 << 60))),
        ("long-frame", 1, opened(Kind::Pub, &[&long(300)[..], &[7; 300]].concat())),
        ("many-frames", 1, opened(Kind::Pub, &[1u8, 0].repeat(9))),
        ("other-type", 1, opened(Kind::Router, b"")),
        ("http", 3, b"HTTP/1.1 400 Bad Request\r\n".repeat(4)),
        ("cut-command", 1, opened(Kind::Pub, &[4, 2, 9, 9])),
    ]
}
