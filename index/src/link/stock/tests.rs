//! A stock engine whose messages get lost, whose connections break, which restarts, and whose replays are cut short.

use super::*;
use crate::answer::Leases;
use crate::link::Setting;
use crate::shared::{Limits as Room, open};
use proto::block::{Fingerprint, Namespace, chain, root};
use proto::fleet::Entry;
use proto::native::dialect::{Event, Removed, Stored};
use std::collections::BTreeSet;

const SEED: u64 = 9;

fn link(replay: bool) -> Link {
    let mut json = serde_json::json!({"name": "a", "events": "tcp://h:1", "source": "native", "model": "m"});
    if replay {
        json["replay"] = "tcp://h:2".into();
    }
    let entry: Entry = serde_json::from_value(json).unwrap_or_else(|e| panic!("{e}"));
    Link::new(Setting { seed: SEED, leases: Leases::default(), reader: 1 }, entry, 0)
}

fn store(parent: Option<u64>, hashes: &[u64]) -> Event {
    // The tokens of a block follow from its hash, so that a fingerprint is told by the chain of hashes.
    let tokens = hashes.iter().flat_map(|hash| [*hash as u32, 7]).collect();
    Event::Stored(Box::new(Stored { parent, hashes: hashes.to_vec(), tokens, block_size: 2, ..Stored::default() }))
}

fn remove(hash: u64) -> Event {
    Event::Removed(Removed { hashes: vec![hash], ..Removed::default() })
}

fn numbered(seq: u64, at: f64, events: Vec<Event>) -> Numbered {
    Numbered { seq, batch: EventBatch { at, events, ..EventBatch::default() }, bytes: 100 }
}

fn prompt(hashes: &[u64]) -> Vec<Fingerprint> {
    let tokens: Vec<u32> = hashes.iter().flat_map(|hash| [*hash as u32, 7]).collect();
    chain(root(Namespace { model: "m", adapter: "", salt: "" }, SEED), 2, &tokens)
}

/// What readers of the table are given for this engine.
fn held(link: &Link, core: &Writer) -> BTreeSet<Fingerprint> {
    let holder = link.live(SetKind::Gpu);
    holder
        .map(|holder| core.members(holder).unwrap_or_else(|e| panic!("{e}")))
        .unwrap_or_default()
        .into_iter()
        .collect()
}

fn asked(out: &mut Vec<Effect>) -> Option<(u64, u64)> {
    let found = out.iter().rev().find_map(|effect| match effect {
        Effect::Events { id, from } => Some((*id, *from)),
        _ => None,
    });
    out.clear();
    found
}

fn reason(link: &Link, core: &Writer) -> (EngineState, String) {
    let status = link.status(core);
    (status.state, status.reason)
}

#[test]
fn who_comes_late_is_told_everything_by_a_replay() {
    let (mut core, _reader) = open(Room::default());
    let (mut link, mut out) = (link(true), vec![]);
    link.connected(&mut core, 0, &mut out);
    let (id, from) = asked(&mut out).expect("a replay is asked for at once");
    assert_eq!(from, 0);
    // A live message waits, though it would fit by itself.
    link.events(&mut core, numbered(2, 0.2, vec![store(Some(11), &[12])]), 1, &mut out);
    link.replayed_events(&mut core, id, numbered(0, 0.0, vec![store(None, &[10])]), 2, &mut out);
    link.replayed_events(&mut core, id, numbered(1, 0.1, vec![store(Some(10), &[11])]), 2, &mut out);
    assert_eq!((held(&link, &core).len(), link.next()), (0, 2), "what is passed through is not shown");
    link.replay_over(&mut core, id, true, "", 3, &mut out);
    assert_eq!(held(&link, &core), prompt(&[10, 11, 12]).into_iter().collect());
    assert_eq!(reason(&link, &core), (EngineState::InStep, String::new()));
    assert_eq!(link.tally.replays, 1);
}

#[test]
fn a_truncated_replay_is_a_partial_view_and_said_to_be() {
    let (mut core, _reader) = open(Room::default());
    let (mut link, mut out) = (link(true), vec![]);
    link.connected(&mut core, 0, &mut out);
    // The ring has rolled over: it begins in the middle. It also has no end marker, however often it is asked.
    let (id, _) = asked(&mut out).expect("a replay");
    link.replayed_events(&mut core, id, numbered(700, 7.0, vec![store(None, &[10])]), 1, &mut out);
    link.replay_over(&mut core, id, false, "nothing came for 3 s", 2, &mut out);
    let mut now_ms = 2;
    while let Some((id, from)) = asked(&mut out) {
        assert_eq!(from, 700);
        link.replayed_events(&mut core, id, numbered(700, 7.0, vec![store(None, &[10])]), now_ms, &mut out);
        link.replay_over(&mut core, id, false, "nothing came for 3 s", now_ms, &mut out);
        now_ms += 500;
        link.tick(&mut core, now_ms, &mut out);
        assert!(now_ms < 10_000, "it gives up");
    }
    assert_eq!(held(&link, &core), prompt(&[10]).into_iter().collect());
    let (state, why) = reason(&link, &core);
    assert_eq!(state, EngineState::Partial);
    assert!(why.contains("events are missing"), "{why}");
    // Missing stays missing, also when the stream goes on; a clear ends it.
    link.events(&mut core, numbered(701, 7.1, vec![store(Some(99), &[11])]), now_ms, &mut out);
    assert_eq!(reason(&link, &core).0, EngineState::Partial);
    link.events(&mut core, numbered(702, 7.2, vec![Event::Cleared(None)]), now_ms, &mut out);
    assert_eq!((reason(&link, &core).0, held(&link, &core).len()), (EngineState::InStep, 0));
}

#[test]
fn a_replay_without_its_end_is_doubted_until_the_stream_goes_on_from_it() {
    let (mut core, _reader) = open(Room::default());
    let (mut link, mut out) = (link(true), vec![]);
    link.connected(&mut core, 0, &mut out);
    let mut now_ms = 0;
    while let Some((id, from)) = asked(&mut out) {
        assert_eq!(from, 0);
        link.replayed_events(&mut core, id, numbered(0, 0.5, vec![store(None, &[10])]), now_ms, &mut out);
        link.replay_over(&mut core, id, false, "the peer closed", now_ms, &mut out);
        now_ms += 500;
        link.tick(&mut core, now_ms, &mut out);
    }
    let (state, why) = reason(&link, &core);
    assert_eq!(state, EngineState::Partial);
    assert!(why.contains("end marker"), "{why}");
    link.events(&mut core, numbered(1, 0.6, vec![store(Some(10), &[11])]), now_ms, &mut out);
    assert_eq!(reason(&link, &core).0, EngineState::InStep);
    assert_eq!(held(&link, &core), prompt(&[10, 11]).into_iter().collect());
}

#[test]
fn a_restart_while_nobody_listened_is_known_by_the_replay() {
    let (mut core, _reader) = open(Room::default());
    let (mut link, mut out) = (link(true), vec![]);
    link.connected(&mut core, 0, &mut out);
    let (id, _) = asked(&mut out).expect("a replay");
    link.replayed_events(&mut core, id, numbered(0, 0.5, vec![store(None, &[10])]), 1, &mut out);
    link.replay_over(&mut core, id, true, "", 1, &mut out);
    link.away("gone".into());
    // The new process has sent exactly as many messages as the old one: its numbers fit.
    link.connected(&mut core, 2, &mut out);
    let (id, from) = asked(&mut out).expect("a replay");
    assert_eq!((from, link.status(&core).credit[0]), (0, false));
    link.replayed_events(&mut core, id, numbered(0, 9.5, vec![store(None, &[20])]), 3, &mut out);
    let (id, from) = asked(&mut out).expect("everything of the new process is asked for");
    assert_eq!((from, held(&link, &core).len(), link.tally.epochs), (0, 0, 1));
    link.replayed_events(&mut core, id, numbered(0, 9.5, vec![store(None, &[20])]), 3, &mut out);
    link.replay_over(&mut core, id, true, "", 4, &mut out);
    assert_eq!(held(&link, &core), prompt(&[20]).into_iter().collect());
    assert_eq!(reason(&link, &core).0, EngineState::InStep);
}

#[test]
fn a_new_start_time_is_another_process() {
    let (mut core, _reader) = open(Room::default());
    let (mut link, mut out) = (link(false), vec![]);
    let pulse = |started| pulse::Pulse { started: Some(started), served: Some(5.0) };
    link.pulse(&mut core, pulse(100.0), 0, &mut out);
    link.connected(&mut core, 0, &mut out);
    link.events(&mut core, numbered(0, 0.5, vec![store(None, &[10])]), 1, &mut out);
    link.pulse(&mut core, pulse(100.0), 1000, &mut out);
    assert_eq!(held(&link, &core).len(), 1);
    link.pulse(&mut core, pulse(200.0), 2000, &mut out);
    assert_eq!((held(&link, &core).len(), link.tally.epochs), (0, 1));
    assert!(out.contains(&Effect::EpochEnded));
    // Where the stream said so first, its metrics are no news.
    link.events(&mut core, numbered(0, 3.5, vec![store(None, &[20])]), 2100, &mut out);
    link.events(&mut core, numbered(0, 4.5, vec![store(None, &[30])]), 2200, &mut out);
    link.pulse(&mut core, pulse(300.0), 3000, &mut out);
    assert_eq!(held(&link, &core), prompt(&[30]).into_iter().collect());
}

#[test]
fn an_engine_that_works_and_says_nothing_is_named() {
    let (mut core, _reader) = open(Room::default());
    let (mut link, mut out) = (link(false), vec![]);
    link.connected(&mut core, 0, &mut out);
    for (second, served) in [(1, 100.0), (2, 9000.0)] {
        let pulse = pulse::Pulse { started: Some(1.0), served: Some(served) };
        link.pulse(&mut core, pulse, second * 1000, &mut out);
    }
    assert!(reason(&link, &core).1.contains("no event of it was heard"));
    link.events(&mut core, numbered(0, 0.5, vec![]), 2001, &mut out);
    assert_eq!(reason(&link, &core), (EngineState::InStep, String::new()));
}

/// Seq, time, events.
type Message = (u64, f64, Vec<Event>);

/// An engine with a ring, seen through a bad network.
struct World {
    state: u64,
    truth: NativeEngine,
    stored: Vec<(Option<u64>, u64)>,
    seq: u64,
    clock: f64,
    ring: VecDeque<Message>,
    ring_size: usize,
    connected: bool,
    /// Sent, and not yet received.
    live: VecDeque<Message>,
    replay: Option<(u64, VecDeque<Message>, bool)>,
    now_ms: u64,
}

impl World {
    fn below(&mut self, bound: u64) -> u64 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) % bound
    }

    fn step(&mut self, lossy: bool) {
        let event = match self.below(20) {
            0..=10 => {
                let parent = match self.stored.len() as u64 {
                    0 => None,
                    n => (self.below(3) > 0).then_some(n).map(|n| self.below(n)).map(|at| self.stored[at as usize].1),
                };
                let hash = self.below(1 << 30);
                self.stored.push((parent, hash));
                store(parent, &[hash])
            }
            11..=13 if !self.stored.is_empty() => {
                let at = self.below(self.stored.len() as u64) as usize;
                store(self.stored[at].0, &[self.stored[at].1])
            }
            14..=18 if !self.stored.is_empty() => {
                let at = self.below(self.stored.len() as u64) as usize;
                remove(self.stored[at].1)
            }
            _ if self.below(10) == 0 => Event::Cleared(None),
            _ => store(None, &[5]),
        };
        self.clock += 0.01;
        let message = (self.seq, self.clock, vec![event]);
        self.seq += 1;
        let batch = EventBatch { at: message.1, events: message.2.clone(), ..EventBatch::default() };
        self.truth.apply(batch, &mut vec![]);
        self.ring.push_back(message.clone());
        if self.ring.len() > self.ring_size {
            self.ring.pop_front();
        }
        if self.connected && !(lossy && self.below(8) == 0) {
            self.live.push_back(message);
        }
    }

    fn restart(&mut self, link: &mut Link) {
        self.cut(link);
        self.truth = NativeEngine::new("m", SEED, Limits::default());
        self.ring.clear();
        (self.seq, self.stored) = (0, vec![]);
    }

    fn cut(&mut self, link: &mut Link) {
        link.away("cut".into());
        self.connected = false;
        self.live.clear();
        if let Some((_, rest, whole)) = &mut self.replay {
            rest.clear();
            *whole = false;
        }
    }

    /// Takes up an ask, if there is one.
    fn ask(&mut self, out: &mut Vec<Effect>, lossy: bool) {
        let Some((id, from)) = asked(out) else { return };
        let mut replies: VecDeque<_> = self.ring.iter().filter(|message| message.0 >= from).cloned().collect();
        let mut whole = self.connected;
        if !self.connected {
            replies.clear();
        } else if lossy {
            match self.below(4) {
                // The socket dropped what did not fit, with or without the end marker.
                0 => {
                    // It takes some at first: what was applied before, and one that was not.
                    let first = replies.len().min(2);
                    let from = first + self.below((replies.len() - first) as u64 + 1) as usize;
                    let to = from + self.below((replies.len() - from) as u64 + 1) as usize;
                    replies.drain(from..to);
                    whole = self.below(2) == 0;
                }
                1 => whole = false,
                _ => {}
            }
        }
        self.replay = Some((id, replies, whole));
    }

    fn deliver(&mut self, link: &mut Link, core: &mut Writer, out: &mut Vec<Effect>) {
        if let Some((seq, at, events)) = self.live.pop_front() {
            link.events(core, numbered(seq, at, events), self.now_ms, out);
        }
    }

    fn reply(&mut self, link: &mut Link, core: &mut Writer, out: &mut Vec<Effect>) {
        let Some((id, rest, whole)) = &mut self.replay else { return };
        match rest.pop_front() {
            Some((seq, at, events)) => link.replayed_events(core, *id, numbered(seq, at, events), self.now_ms, out),
            None => {
                let (id, whole) = (*id, *whole);
                self.replay = None;
                link.replay_over(core, id, whole, "cut", self.now_ms, out);
            }
        }
    }
}

fn run(seed: u64, ring_size: usize, replay: bool) {
    let (mut core, _reader) = open(Room::default());
    let (mut link, mut out) = (link(replay), vec![]);
    let mut world = World {
        state: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15),
        truth: NativeEngine::new("m", SEED, Limits::default()),
        stored: vec![],
        seq: 0,
        clock: 0.0,
        ring: VecDeque::new(),
        ring_size,
        connected: false,
        live: VecDeque::new(),
        replay: None,
        now_ms: 0,
    };
    for round in 0..12 {
        for _ in 0..60 {
            match world.below(40) {
                0 => world.restart(&mut link),
                1 => world.cut(&mut link),
                2..=3 if !world.connected => {
                    world.connected = true;
                    link.connected(&mut core, world.now_ms, &mut out);
                }
                4..=16 => world.step(true),
                17..=26 => world.deliver(&mut link, &mut core, &mut out),
                27..=37 => world.reply(&mut link, &mut core, &mut out),
                _ => {
                    world.now_ms += 300;
                    link.tick(&mut core, world.now_ms, &mut out);
                }
            }
            world.ask(&mut out, true);
        }
        // The network heals, and the engine goes on.
        if !world.connected {
            world.connected = true;
            link.connected(&mut core, world.now_ms, &mut out);
            world.ask(&mut out, false);
        }
        let mut turns = 0;
        world.step(false);
        while !world.live.is_empty() || world.replay.is_some() || link.stock.as_ref().is_some_and(|s| s.asked.is_some())
        {
            world.deliver(&mut link, &mut core, &mut out);
            world.reply(&mut link, &mut core, &mut out);
            world.ask(&mut out, false);
            world.now_ms += 100;
            link.tick(&mut core, world.now_ms, &mut out);
            world.ask(&mut out, false);
            turns += 1;
            assert!(turns < 5000, "seed {seed} round {round}: it does not come to rest");
        }
        let mut truth = BTreeSet::new();
        world.truth.residency().chains(|_, run| truth.extend(run.iter().copied()));
        let (held, (state, why)) = (held(&link, &core), reason(&link, &core));
        assert!(held.is_subset(&truth), "seed {seed} round {round}: credit that the engine does not have ({why})");
        assert_eq!(link.next(), world.seq, "seed {seed} round {round}");
        if replay && ring_size > 10_000 {
            assert_eq!(state, EngineState::InStep, "seed {seed} round {round}: {why}");
        }
        if state == EngineState::InStep {
            assert_eq!(held, truth, "seed {seed} round {round}");
        }
    }
}

#[test]
fn whatever_the_network_does_a_replay_brings_the_whole_truth() {
    (1..=60).for_each(|seed| run(seed, 1 << 20, true));
}

#[test]
fn a_small_ring_or_none_loses_credit_and_invents_none() {
    (100..=160).for_each(|seed| run(seed, 8, true));
    (200..=260).for_each(|seed| run(seed, 0, false));
}
