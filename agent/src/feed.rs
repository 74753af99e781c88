//! The stream of one engine: records in, numbered messages out, each at most once an engine step, and heartbeats.

use crate::adapters::Adapters;
use crate::batch;
use crate::engine::Gauges;
use crate::facts::Facts;
use crate::follower::{Follower, Step};
use crate::gpus::Measured;
use crate::health::Pulse;
use crate::record::Record;
use crate::replay::Replay;
use crate::ring::Reader;
use crate::snapshot::Cuts;
use crate::state::{Identity, Pace, state};
use proto::event::{Batch, Clear, Counters, Op, PROTOCOL};
use proto::id::SetKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What is published of one engine.
#[derive(Debug)]
pub struct Feed {
    identity: Identity,
    facts: Facts,
    gauges: Arc<Gauges>,
    ring: Reader,
    words: Vec<u64>,
    follower: Follower,
    step: Step,
    replay: Replay,
    cuts: Cuts,
    counters: Counters,
    heartbeat_ms: u64,
    spoke_ms: Option<u64>,
    pulse: Pulse,
    measured: Option<Measured>,
    // Asleep and draining, as last told.
    will: (bool, bool),
}

impl Feed {
    /// Publishes what the other end of `ring` tells.
    pub fn new(identity: Identity, facts: Facts, ring: Reader, gauges: Arc<Gauges>, heartbeat_ms: u64) -> Self {
        let adapters = Adapters::new(facts.max_adapters as usize, facts.max_cached_adapters as usize);
        let follower = Follower::new(facts.plan.clone(), facts.total_blocks as usize, adapters);
        Self {
            identity,
            facts,
            gauges,
            ring,
            words: Vec::new(),
            follower,
            step: Step::default(),
            replay: Replay::default(),
            cuts: Cuts::default(),
            counters: Counters::default(),
            heartbeat_ms,
            spoke_ms: None,
            pulse: Pulse::default(),
            measured: None,
            will: (false, false),
        }
    }

    /// Who speaks.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The messages that are kept.
    pub fn replay(&self) -> &Replay {
        &self.replay
    }

    /// What is followed.
    pub fn follower(&self) -> &Follower {
        &self.follower
    }

    /// What the agent counts of itself.
    pub fn counters(&self) -> Counters {
        let (unknown_below, unknown_media) = self.gauges.unknown();
        let faults = self.gauges.faults() + self.counters.faults;
        Counters {
            faults,
            untold: self.gauges.untold(),
            snapshots: self.cuts.made(),
            unknown_below,
            unknown_media,
            ..self.counters
        }
    }

    /// `messages` were not handed to a reader that lags.
    pub fn lagged(&mut self, messages: u64) {
        self.counters.dropped += messages;
        self.counters.renewals += 1;
    }

    /// A replay was answered.
    pub fn replayed(&mut self) {
        self.counters.replays += 1;
    }

    /// The engine's GPUs were measured, or cannot be any more.
    pub fn measured(&mut self, measured: Option<Measured>) {
        self.measured = measured;
    }

    /// Had the engine's side no room to tell everything, when it last woke this one?
    pub fn owed(&self) -> bool {
        self.gauges.owes()
    }

    /// From one heartbeat to the next.
    pub fn heartbeat_ms(&self) -> u64 {
        self.heartbeat_ms
    }

    /// When the next heartbeat is due, on the clock of `now_ms`.
    pub fn due_ms(&self) -> u64 {
        self.spoke_ms.map_or(0, |spoke| spoke + self.heartbeat_ms)
    }

    /// Takes what the engine told, and publishes it together with the heartbeat when that is due. `now_ms` is a
    /// clock that never goes back, `unix_ms` the time of day, `bundle` the digest of the bundle.
    pub fn publish(&mut self, now_ms: u64, unix_ms: u64, bundle: &str) {
        while let Some(kind) = self.ring.pop(&mut self.words) {
            match Record::read(kind, &self.words) {
                Some(record) => self.follower.apply(record, &mut self.step),
                None => self.counters.faults += 1,
            }
        }
        self.words.shrink_to(1 << 16);
        let (steps, counts) = (self.gauges.steps(), self.gauges.counts());
        let will = (self.gauges.asleep(), self.gauges.draining());
        // Work that waits for an engine that was told to rest is not stalled.
        let waits = counts.running + counts.waiting > 0 && will == (false, false);
        let stalled_ms = self.pulse.look(now_ms, steps, waits);
        // Sleep and drain are told at once: no request should go there any more.
        let beat = now_ms >= self.due_ms() || will != self.will;
        if self.step.is_empty() && !beat {
            return;
        }
        let mut ops = Vec::new();
        if std::mem::take(&mut self.step.cleared) {
            ops.push(Op::Clear(Clear { kind: None }));
        }
        let follower = &self.follower;
        for kind in SetKind::ALL {
            let (changes, closed) = (&self.step.changes[kind.index()], follower.sets().closed(kind));
            ops.extend(batch::ops((kind, closed), changes, &self.identity.model, |root| follower.adapter(root)));
        }
        ops.extend(self.step.lives.drain(..).map(Op::Life));
        for changes in &mut self.step.changes {
            changes.clear();
            changes.shrink_to(1 << 12);
        }
        self.follower.told();
        let mut messages = batch::split(ops);
        if beat && let Some(last) = messages.last_mut() {
            let pace = Pace { steps, stalled_ms, asleep: will.0, draining: will.1, measured: self.measured.as_ref() };
            let state = state(&self.identity, &self.facts, &self.follower, counts, pace, bundle, self.counters());
            last.push(Op::State(Box::new(state)));
            self.spoke_ms = Some(now_ms);
            self.will = will;
        }
        for ops in messages {
            let batch = Batch { version: PROTOCOL, epoch: self.identity.epoch, step_ms: unix_ms, ops };
            let seq = match batch.encode() {
                Ok(payload) => self.replay.push(payload),
                Err(_) => {
                    // Cannot happen for these types. If it does, an empty message shows the loss by its digest.
                    self.counters.faults += 1;
                    continue;
                }
            };
            self.gauges.published.store(seq, Ordering::Relaxed);
        }
    }

    /// Piece 0 of a snapshot of what is published.
    pub fn cut(&mut self, now_ms: u64) -> Vec<u8> {
        self.cuts.expire(now_ms);
        let follower = &self.follower;
        self.cuts.begin(
            self.identity.epoch,
            self.replay.next(),
            follower.sets(),
            &self.identity.model,
            |root| follower.adapter(root),
            now_ms,
        )
    }

    /// Another piece of a cut.
    pub fn piece(&mut self, cut: u64, piece: u32, now_ms: u64) -> Option<Vec<u8>> {
        self.cuts.piece(cut, piece, now_ms)
    }

    /// To be called now and then: drops cuts that nobody reads.
    pub fn tidy(&mut self, now_ms: u64) {
        self.cuts.expire(now_ms);
    }
}

#[cfg(test)]
#[path = "feed_tests.rs"]
mod tests;
