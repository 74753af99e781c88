//! Recorded streams of real vLLM 0.11.0, 0.28.0 and 0.32.0 predict, exactly, what those engines took from cache.
//!
//! `tests/golden/recordings` holds, in time order, every message that an engine published and every request with its
//! prompt tokens and the cached tokens of its usage field.
//!
//! What a stream can say: a request that was alone is predicted from the set at that moment, exactly. Requests sent
//! together hit what the engine's own order gave them, also blocks that another one of the same step stored just
//! before: what they were given must be the prediction at some event between their sending and their answer.
//! vLLM 0.11 does not tell salts, so its salted requests are predicted 0 until they are used without one.

use harness::seeded::Seeded;
use index::shared::{Limits, Reader, Writer};
use proto::block::{self, Fingerprint, Namespace};
use proto::digest::Digest;
use proto::id::SetKind;
use proto::native::dialect::EventBatch;
use proto::native::engine::{self, NativeEngine};
use proto::native::frames::{self, Message};
use proto::residency::Change;
use serde::Deserialize;

const SEED: u64 = 0x5eed;

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    /// A live message, frames in hex.
    Frames(Vec<String>),
    /// A reply of the replay socket.
    Replay(Vec<String>),
    /// A request that was alone in the engine.
    Request(Request),
    /// One of several requests at once is sent: its step.
    Sent(String),
    /// It was answered.
    Answered(Request),
    /// The cache was emptied by an HTTP call. The engine publishes that with its *next* step only.
    Reset(()),
}

#[derive(Deserialize)]
struct Request {
    step: String,
    adapter: String,
    salt: String,
    tokens: Vec<u32>,
    cached: usize,
}

impl Request {
    fn fingerprints(&self, block_size: u32) -> Vec<Fingerprint> {
        let root = block::root(Namespace { model: "tiny", adapter: &self.adapter, salt: &self.salt }, SEED);
        block::chain(root, block_size as usize, &self.tokens)
    }
}

fn lines(recording: &str) -> Vec<Line> {
    recording.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line:.80}"))).collect()
}

fn bytes(frames: &[String]) -> Vec<Vec<u8>> {
    let hex = |text: &String| {
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("hex")).collect()
    };
    frames.iter().map(hex).collect()
}

fn decode(frames: &[String]) -> (u64, EventBatch) {
    match frames::read(&bytes(frames)) {
        Ok(Message::Batch { seq, payload }) => (seq, EventBatch::decode(payload).expect("a batch of events")),
        other => panic!("{other:?}"),
    }
}

/// The engine's set in the index: what the changes become behind the lookup.
struct Indexed {
    writer: Writer,
    reader: Reader,
}

impl Indexed {
    fn new() -> Self {
        let (mut writer, reader) = index::shared::open(Limits::default());
        let holder = writer.open(0, SetKind::Gpu).expect("a holder");
        writer.publish(holder).expect("an open holder");
        Self { writer, reader }
    }

    fn apply(&mut self, cleared: bool, changes: &[Change]) {
        let mut holder = self.writer.live(0, SetKind::Gpu).expect("a live holder");
        if cleared {
            holder = self.writer.clear(holder).expect("a live holder");
        }
        for change in changes {
            let done = match change {
                Change::Added { fp, .. } => self.writer.store(holder, &[*fp]),
                Change::Removed { fp } => self.writer.remove(holder, &[*fp]),
            };
            assert_eq!(done.expect("a live holder").changed, 1, "{change:?} changed nothing");
        }
    }

    fn depth(&mut self, prompt: &[Fingerprint]) -> usize {
        self.reader.find(prompt).iter().map(|(_, depth)| depth as usize).max().unwrap_or(0)
    }
}

/// Plays a recording. Every request must be predicted exactly; `salts_told`: the dialect has the salts. Where it has
/// not, salted requests must be predicted 0: never more than the engine delivers.
fn play(recording: &str, block_size: u32, salts_told: bool) -> (NativeEngine, usize, usize) {
    let mut engine = NativeEngine::new("tiny", SEED, engine::Limits::default());
    let (mut index, mut changes) = (Indexed::new(), vec![]);
    let (mut next_seq, mut requests, mut cached) = (0, 0, 0);
    let lines = lines(recording);
    let together: Vec<&Request> =
        lines.iter().filter_map(|line| if let Line::Answered(request) = line { Some(request) } else { None }).collect();
    // What each of those under way was predicted, at each event since it was sent.
    let mut under_way: Vec<(&Request, Vec<usize>)> = vec![];
    let predict = |engine: &NativeEngine, request: &Request| {
        let depth = engine.residency().depth(&request.fingerprints(block_size));
        block::cached_tokens(depth, block_size as usize, request.tokens.len())
    };
    for line in &lines {
        match line {
            Line::Frames(frames) => {
                let (seq, batch) = decode(frames);
                assert_eq!(seq, next_seq, "the recording has a gap");
                next_seq += 1;
                // One event at a time: what a request hits may have been stored by another one of its step.
                for event in batch.events {
                    let one = EventBatch { at: batch.at, events: vec![event], ..EventBatch::default() };
                    let cleared = engine.apply(one, &mut changes);
                    index.apply(cleared, &changes);
                    under_way.iter_mut().for_each(|(request, seen)| seen.push(predict(&engine, request)));
                }
                let holder = index.writer.live(0, SetKind::Gpu).expect("a live holder");
                assert_eq!(index.writer.digest(holder), Ok(engine.residency().digest()), "after seq {seq}");
            }
            Line::Sent(step) => {
                let request = together.iter().find(|request| request.step == *step).expect("it was answered");
                under_way.push((request, vec![predict(&engine, request)]));
            }
            Line::Answered(request) => {
                let at = under_way.iter().position(|(one, _)| one.step == request.step).expect("it was sent");
                let (_, seen) = under_way.remove(at);
                assert!(seen.contains(&request.cached), "{}: {} delivered, {seen:?}", request.step, request.cached);
                requests += 1;
                cached += request.cached;
            }
            Line::Reset(()) => {
                engine.restart();
                index.apply(true, &[]);
            }
            Line::Request(request) => {
                let prompt = request.fingerprints(block_size);
                let depth = engine.residency().depth(&prompt);
                assert_eq!(index.depth(&prompt), depth, "{}: the index differs from its source", request.step);
                let want = if request.salt.is_empty() || salts_told { request.cached } else { 0 };
                let got = block::cached_tokens(depth, block_size as usize, request.tokens.len());
                assert_eq!(got, want, "{}: predicted and delivered cached tokens", request.step);
                requests += 1;
                cached += got;
            }
            Line::Replay(_) => {}
        }
    }
    assert_eq!(engine.block_size(), Some(block_size));
    (engine, requests, cached)
}

/// What must not happen on a healthy stream of a plain model.
fn nothing_odd(engine: &NativeEngine, but: &[&str]) {
    let usual = ["stored", "removed", "cleared"];
    let odd: Vec<_> =
        engine.counters().iter().filter(|(n, c)| *c > 0 && !usual.contains(n) && !but.contains(n)).collect();
    assert_eq!(odd, [], "counted on a healthy stream");
}

#[test]
fn vllm_0_11_0_arrays_without_salts() {
    let (engine, requests, cached) = play(include_str!("../golden/recordings/vllm-0.11.0.jsonl"), 16, false);
    assert_eq!((requests, cached), (24, 336 + 5 * 192));
    // Three salted requests look like unsalted ones under other hashes; only what they hide is not credited.
    nothing_odd(&engine, &["hidden", "unnamed_parent"]);
    assert!(engine.counters().hidden > 0);
}

#[test]
fn vllm_0_28_0_maps() {
    let (engine, requests, cached) = play(include_str!("../golden/recordings/vllm-0.28.0.jsonl"), 16, true);
    assert_eq!((requests, cached), (33, 688 + 5 * 192));
    nothing_odd(&engine, &[]);
    assert_eq!(engine.unnamed(), 0);
}

#[test]
fn vllm_0_32_0_maps() {
    let (engine, requests, cached) = play(include_str!("../golden/recordings/vllm-0.32.0.jsonl"), 32, true);
    assert_eq!((requests, cached), (33, 640 + 5 * 192));
    nothing_odd(&engine, &[]);
    assert_eq!(engine.unnamed(), 0);
}

#[test]
fn replays_of_old_and_new_layout_are_read() {
    for recording in [
        include_str!("../golden/recordings/vllm-0.11.0.jsonl"),
        include_str!("../golden/recordings/vllm-0.28.0.jsonl"),
        include_str!("../golden/recordings/vllm-0.32.0.jsonl"),
    ] {
        let lines = lines(recording);
        let live = lines.iter().find_map(|line| if let Line::Frames(f) = line { Some(decode(f)) } else { None });
        let replies: Vec<_> =
            lines.iter().filter_map(|l| if let Line::Replay(f) = l { Some(f) } else { None }).collect();
        assert_eq!(replies.len(), 2, "a recording ends with the first reply and the end marker");
        assert_eq!(Some(decode(replies[0])), live);
        assert_eq!(frames::read(&bytes(replies[1])), Ok(Message::End));
    }
}

/// A subscriber that comes late knows no parents: what it credits is a part of the truth, and it is whole again for
/// every prompt that is stored from its start.
#[test]
fn a_late_subscriber_credits_no_more_than_the_truth() {
    for (recording, block_size) in [
        (include_str!("../golden/recordings/vllm-0.28.0.jsonl"), 16),
        (include_str!("../golden/recordings/vllm-0.32.0.jsonl"), 32),
    ] {
        for skipped in [1, 2, 5, 20, 40] {
            let mut engine = NativeEngine::new("tiny", SEED, engine::Limits::default());
            let (mut messages, mut changes) = (0, vec![]);
            for line in lines(recording) {
                match line {
                    Line::Frames(frames) => {
                        messages += 1;
                        if messages > skipped {
                            engine.apply(decode(&frames).1, &mut changes);
                        }
                    }
                    Line::Reset(()) => engine.restart(),
                    Line::Request(request) => {
                        let depth = engine.residency().depth(&request.fingerprints(block_size));
                        let got = block::cached_tokens(depth, block_size as usize, request.tokens.len());
                        assert!(got <= request.cached, "{} after {skipped} lost: {got}", request.step);
                    }
                    Line::Replay(_) | Line::Sent(_) | Line::Answered(_) => {}
                }
            }
        }
    }
}

/// Bytes that are changed, lost or doubled on their way cost what they said, and leave the set whole.
#[test]
fn spoiled_payloads_do_no_harm() {
    for seed in 1..=8 {
        let mut dice = Seeded::new(seed);
        let (mut read, mut refused) = (0, 0);
        for recording in [
            include_str!("../golden/recordings/vllm-0.11.0.jsonl"),
            include_str!("../golden/recordings/vllm-0.32.0.jsonl"),
        ] {
            let mut engine = NativeEngine::new("tiny", SEED, engine::Limits { blocks: 100, parked_tokens: 1000 });
            let mut changes = vec![];
            for line in lines(recording) {
                let Line::Frames(frames) = line else { continue };
                let mut payload = bytes(&frames).pop().expect("a payload");
                for _ in 0..=dice.below(3) {
                    let at = dice.below(payload.len());
                    match dice.below(4) {
                        0 => payload.truncate(at),
                        1 => payload.insert(at, dice.word() as u8),
                        2 => drop(payload.splice(at..at, payload[at..].to_vec()).count()),
                        _ => payload[at] = dice.word() as u8,
                    }
                    if payload.is_empty() {
                        break;
                    }
                }
                match EventBatch::decode(&payload) {
                    Ok(batch) => {
                        read += 1;
                        engine.apply(batch, &mut changes);
                    }
                    Err(_) => refused += 1,
                }
                let mut members = vec![];
                engine.residency().chains(|_, chain| members.extend_from_slice(chain));
                let digest = members.into_iter().collect::<Digest>();
                assert_eq!(digest, engine.residency().digest(), "seed {seed}");
                assert!(engine.residency().resident() + engine.unnamed() <= 100, "seed {seed}: beyond the limit");
                assert!(engine.parked_tokens() <= 1000, "seed {seed}: beyond the limit");
            }
        }
        assert!(read > 10 && refused > 10, "seed {seed}: {read} read, {refused} refused: this tests nothing");
    }
}
