//! What fuzzing tries: one function for each decoder and core that takes a peer's bytes.
//!
//! `tests/fuzz` runs them under libFuzzer (nightly); `tests/it/fuzz_corpus.rs` runs them over the corpus in the
//! repository on stable, so whatever was once found stays found. A function panics when something does not hold.
//! [`seeds`] makes what the corpus begins with.

pub mod seeds;

use crate::naive::{Copies, apply};
use bytes::BufMut;
use proto::digest::Digest;
use proto::event::Batch;
use proto::native::dialect::EventBatch;
use proto::native::engine::{Limits, NativeEngine};
use proto::native::frames::{self, Message};
use proto::residency::{Change, Link, Residency};
use proto::zmtp::{Incoming, Kind, Wire};
use proto::{control, zmtp};
use std::collections::{BTreeMap, BTreeSet};

/// A function of this file.
pub type Target = fn(&[u8]);

/// All of them, by the name of their folder in the corpus.
pub const TARGETS: [(&str, Target); 7] = [
    ("native_batch", native_batch),
    ("native_stream", native_stream),
    ("native_frames", native_frames),
    ("agent_batch", agent_batch),
    ("control", control_message),
    ("residency", residency),
    ("zmtp", zmtp_wire),
];

/// What one engine may hold here: small, so that the limits are reached.
const LIMITS: Limits = Limits { blocks: 64, parked_tokens: 256 };

/// One payload of a stock engine.
pub fn native_batch(data: &[u8]) {
    native([data]);
}

/// Payloads one after another: two bytes of length, big-endian, before each.
pub fn native_stream(data: &[u8]) {
    let mut rest = data;
    native(std::iter::from_fn(|| {
        let (length, after) = rest.split_first_chunk::<2>()?;
        let (payload, after) = after.split_at_checked(usize::from(u16::from_be_bytes(*length)).min(after.len()))?;
        rest = after;
        Some(payload)
    }));
}

/// The members of a set, as it lists them: each after what it follows.
fn members(set: &Residency) -> BTreeSet<u64> {
    let mut members = BTreeSet::new();
    set.chains(|parent, run| {
        if let Link::Block(parent) = parent {
            assert!(members.contains(&parent), "a chain is listed before its parent {parent}");
        }
        assert!(run.iter().all(|fp| members.insert(*fp)), "a block is listed twice");
    });
    members
}

/// A set as a follower of the told changes has it: prefix-closed after every single one.
#[derive(Default)]
struct Follower {
    set: BTreeSet<u64>,
    parents: BTreeMap<u64, Link>,
}

impl Follower {
    fn follow(&mut self, emptied: bool, changes: &[Change], set: &Residency) {
        if emptied {
            self.set.clear();
        }
        for &change in changes {
            if let Change::Added { parent, fp } = change {
                self.parents.insert(fp, parent);
            }
            apply(&mut self.set, &self.parents, change);
        }
        assert_eq!(self.set, members(set), "what was told is not what is listed");
        assert_eq!(set.digest(), Digest::from_iter(self.set.iter().copied()), "the digest is of something else");
    }
}

fn native<'a>(payloads: impl IntoIterator<Item = &'a [u8]>) {
    let mut engine = NativeEngine::new("m", 7, LIMITS);
    let (mut gpu, mut any, mut changes) = (Follower::default(), Follower::default(), vec![]);
    for (at, payload) in payloads.into_iter().take(256).enumerate() {
        engine.tick(at as u64 * 60_000);
        let Ok(batch) = EventBatch::decode(payload) else { continue };
        let cleared = engine.apply(batch, &mut changes);
        gpu.follow(cleared, &changes, engine.residency());
        let emptied = engine.any_changes(&mut changes);
        if let Some(set) = engine.any() {
            any.follow(emptied, &changes, set);
            assert!(gpu.set.is_subset(&any.set), "a block on the GPU is nowhere");
        }
        assert!(engine.residency().resident() + engine.unnamed() <= LIMITS.blocks, "more blocks than may be kept");
        assert!(engine.parked_tokens() <= LIMITS.parked_tokens, "more tokens than may be parked");
    }
    engine.restart();
    assert_eq!((engine.residency().nodes(), engine.unnamed(), engine.parked_tokens()), (0, 0, 0));
}

/// Frames of a message: a byte of length before each.
pub fn native_frames(data: &[u8]) {
    let mut frames = vec![];
    let mut rest = data;
    while let Some((length, after)) = rest.split_first() {
        let (frame, after) = after.split_at(usize::from(*length).min(after.len()));
        frames.push(frame);
        rest = after;
    }
    match frames::read(&frames) {
        Ok(Message::Batch { seq, payload }) => {
            assert_ne!(seq, u64::MAX, "the end marker is no seq");
            assert_eq!(Some(&payload), frames.last());
        }
        Ok(Message::End) => assert!(frames.last().is_some_and(|last| last.is_empty())),
        Err(_) => {}
    }
}

/// One payload of an agent.
pub fn agent_batch(data: &[u8]) {
    let Ok(batch) = Batch::decode(data) else { return };
    // NaN differs from itself, its bytes do not.
    let bytes = batch.encode().expect("what was decoded encodes");
    let again = Batch::decode(&bytes).expect("what was encoded decodes");
    assert_eq!(again.encode().ok(), Some(bytes), "a batch changes on its way");
}

/// A request to an agent, or its reply.
pub fn control_message(data: &[u8]) {
    fn round<T: serde::Serialize + for<'de> serde::Deserialize<'de>>(data: &[u8]) {
        let Ok(message) = control::decode::<T>(data) else { return };
        let bytes = control::encode(&message).expect("what was decoded encodes");
        let again = control::decode::<T>(&bytes).expect("what was encoded decodes");
        assert_eq!(control::encode(&again).ok(), Some(bytes), "a message changes on its way");
    }
    round::<control::Request>(data);
    round::<control::Reply>(data);
}

/// Copies that come and go, against the naive model. The first 32 bytes say what each block follows, then each pair
/// is a deed and a block.
pub fn residency(data: &[u8]) {
    const BLOCKS: usize = 32;
    let name = |at: usize| 1000 + at as u64;
    let told = |at: usize| usize::from(data.get(at).copied().unwrap_or(0));
    let parent = |at: usize| match told(at) {
        255 => Link::Block(name(at)),
        byte if at == 0 || byte % 8 == 0 => Link::Root(1 + (byte / 8 % 2) as u64),
        byte => Link::Block(name(byte % at)),
    };
    let parents: BTreeMap<u64, Link> = (0..BLOCKS).map(|at| (name(at), parent(at))).collect();
    let (mut real, mut naive, mut set) = (Residency::new(), Copies::default(), BTreeSet::new());
    for deed in data.get(BLOCKS..).unwrap_or_default().chunks_exact(2).take(2048) {
        let fp = name(usize::from(deed[1]) % BLOCKS);
        let mut changes = vec![];
        match deed[0] % 16 {
            0 => {
                real.clear();
                (naive, set) = (Copies::default(), BTreeSet::new());
            }
            1..=8 => {
                real.add(fp, parents[&fp], &mut changes);
                naive.add(fp, parents[&fp]);
            }
            _ => assert_eq!(real.drop(fp, &mut changes), naive.drop(fp)),
        }
        changes.into_iter().for_each(|change| apply(&mut set, &parents, change));
        assert_eq!(set, naive.reachable());
        assert_eq!((real.resident(), real.digest()), (naive.0.len(), Digest::from_iter(set.iter().copied())));
    }
    assert_eq!(members(&real), set);
}

/// What a peer sends over a connection: the first byte says what this side is, the second how much arrives at once.
pub fn zmtp_wire(data: &[u8]) {
    const LIMITS: zmtp::Limits = zmtp::Limits { frames: 4, bytes: 1000 };
    let [kind, step, sent @ ..] = data else { return };
    let kind = [Kind::Pub, Kind::Sub, Kind::Router, Kind::Dealer][usize::from(kind % 4)];
    let whole = wire(kind, sent, sent.len(), LIMITS);
    assert_eq!(wire(kind, sent, usize::from(*step), LIMITS), whole, "in pieces of {step} bytes it is something else");
}

/// What a connection gives for these bytes, and how it ends.
fn wire(kind: Kind, sent: &[u8], step: usize, limits: zmtp::Limits) -> (Vec<Incoming>, Option<zmtp::Broken>) {
    let mut wire = Wire::new(kind, limits);
    let mut got = vec![];
    for piece in sent.chunks(step.max(1)) {
        wire.room().put_slice(piece);
        loop {
            match wire.take() {
                Ok(Some(incoming)) => {
                    if let Incoming::Message(frames) = &incoming {
                        let bytes: usize = frames.iter().map(|frame| frame.len()).sum();
                        assert!(frames.len() <= limits.frames && bytes <= limits.bytes, "beyond the limits");
                    }
                    if let Incoming::Command { name, body } = &incoming {
                        let _ = zmtp::pong(name, body);
                    }
                    got.push(incoming);
                }
                Ok(None) => break,
                Err(broken) => return (got, Some(broken)),
            }
        }
        assert!(wire.reserved() < sent.len() + (1 << 18), "memory follows what arrived, not what was claimed");
    }
    (got, None)
}
