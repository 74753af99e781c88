//! A stock engine's own events, where no agent is installed: nothing proves that the set is the engine's, so it is said
//! to be `partial` whenever something is known to be missing, and never said to be in step.
//!
//! Quiet is not stale here: the engine lives as long as its connection does. A seq that falls is a restart. After a
//! gap everything is forgotten and built anew from what comes: credit is lost, never invented.

use super::{Effect, Link};
use crate::answer::EngineState;
use crate::shared::{Refused, Writer};
use proto::id::SetKind;
use proto::native::dialect::EventBatch;
use proto::native::engine::{Limits, NativeEngine};
use proto::residency::Change;

/// What is known of a stock engine.
#[derive(Debug)]
pub(super) struct Stock {
    engine: NativeEngine,
    /// The next seq; `None` before the first.
    next: Option<u64>,
    /// Blocks were stored that were not heard of.
    partial: bool,
    /// The connection is open.
    pub(super) up: bool,
    changes: Vec<Change>,
}

impl Stock {
    pub(super) fn new(model: String, seed: u64) -> Self {
        let engine = NativeEngine::new(model, seed, Limits::default());
        Self { engine, next: None, partial: false, up: false, changes: Vec::new() }
    }

    pub(super) fn next(&self) -> u64 {
        self.next.unwrap_or(0)
    }

    pub(super) fn block_size(&self) -> Option<u32> {
        self.engine.block_size()
    }

    /// Everything is gone, and what comes next is the middle of a stream.
    pub(super) fn forget(&mut self) {
        self.engine.restart();
        self.next = None;
        self.partial = true;
    }

    pub(super) fn reason(&self) -> Option<&'static str> {
        if self.engine.blind() {
            return Some("the engine has several cache groups and does not say of which kinds: nothing is credited");
        }
        if self.engine.lookahead() {
            return Some(
                "the engine looks ahead (EAGLE): its hits are shorter than its events say, nothing is credited",
            );
        }
        (self.up && self.partial)
            .then_some("events are missing: what was stored before is not credited until it is used again")
    }

    pub(super) fn state(&self) -> ([bool; SetKind::COUNT], EngineState) {
        let credit = self.up && !self.engine.blind() && !self.engine.lookahead();
        let state = match self.next {
            None => EngineState::Syncing,
            Some(_) if self.partial || !credit => EngineState::Partial,
            Some(_) => EngineState::InStep,
        };
        (std::array::from_fn(|kind| credit && kind == SetKind::Gpu.index()), state)
    }
}

impl Link {
    /// The connection of a stream of the engine's own events is open.
    pub fn connected(&mut self, now_ms: u64) {
        if let Some(stock) = &mut self.stock {
            stock.up = true;
            self.heard_ms = Some(now_ms);
            self.fault.clear();
            self.dirty = true;
        }
    }

    /// One batch of the engine's own events.
    pub fn events(
        &mut self,
        core: &mut Writer,
        seq: u64,
        batch: EventBatch,
        bytes: usize,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) {
        self.dirty = true;
        self.tally.messages += 1;
        self.tally.bytes += bytes as u64;
        self.heard_ms = Some(now_ms);
        if self.shed || now_ms < self.rest_until_ms {
            return;
        }
        self.whole_ms = Some(now_ms);
        if let Some(rank) = batch.rank {
            self.rank = rank;
        }
        let outcome = self.take_events(core, seq, batch, out);
        self.settle(core, outcome, now_ms);
    }

    fn take_events(
        &mut self,
        core: &mut Writer,
        seq: u64,
        batch: EventBatch,
        out: &mut Vec<Effect>,
    ) -> Result<(), Refused> {
        let Some(stock) = self.stock.as_mut() else { return Ok(()) };
        let mut anew = false;
        match stock.next {
            Some(next) if seq == next => {}
            None => stock.partial = seq > 0,
            Some(next) => {
                anew = true;
                stock.partial = seq > 0;
                if seq > next {
                    self.tally.gaps += 1;
                    out.push(Effect::LivesLost);
                } else {
                    self.tally.epochs += 1;
                    out.push(Effect::EpochEnded);
                }
                stock.engine.restart();
            }
        }
        stock.next = Some(seq.saturating_add(1));
        let mut changes = std::mem::take(&mut stock.changes);
        let cleared = stock.engine.apply(batch, &mut changes);
        if cleared {
            stock.partial = false;
        }
        let gpu = SetKind::Gpu.index();
        if (anew || cleared)
            && let Some(holder) = self.live[gpu].take()
        {
            core.retire(holder)?;
        }
        // Runs of additions and of removals, so that the table is asked once a run; order is kept.
        let mut run: Vec<u64> = Vec::new();
        for part in changes.chunk_by(|a, b| matches!(a, Change::Added { .. }) == matches!(b, Change::Added { .. })) {
            run.clear();
            run.extend(part.iter().map(|change| match change {
                Change::Added { fp, .. } | Change::Removed { fp } => *fp,
            }));
            let holder = self.holder(core, SetKind::Gpu)?;
            match part.first() {
                Some(Change::Added { .. }) => core.store(holder, &run)?,
                _ => core.remove(holder, &run)?,
            };
        }
        if let Some(stock) = self.stock.as_mut() {
            stock.changes = changes;
        }
        Ok(())
    }
}
