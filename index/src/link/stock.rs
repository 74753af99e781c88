//! A stock engine's own events, where no agent is installed: nothing proves that the set is the engine's, so it is said
//! to be `partial` whenever something is known to be missing, and never said to be in step.
//!
//! Quiet is not stale here: the engine lives as long as its `/metrics` can be read or, where the fleet list has no
//! address, as its connection is open. Another process is known by a seq that falls, by the start time in its metrics,
//! and by a replay that does not begin with the message that was applied last ([`catch_up`]). A gap that no replay
//! closes empties the set, which is built anew from what comes: credit is lost, never invented.

pub mod pulse;

mod catch_up;

use super::backlog::Backlog;
use super::{Effect, Link};
use crate::answer::EngineState;
use crate::shared::{Refused, Writer};
use catch_up::CatchUp;
use proto::id::SetKind;
use proto::native::counters::Counters;
use proto::native::dialect::EventBatch;
use proto::native::engine::{Limits, NativeEngine};
use proto::residency::Change;
use std::collections::VecDeque;

/// Messages that are remembered by seq and time, to tell one that comes again from one of another process that has the
/// same number. A live message is overtaken by a replay by a few messages at most.
const MOST_RECENT: usize = 256;

/// One message of a stock engine.
#[derive(Debug)]
pub struct Numbered {
    /// Its number in the engine's life.
    pub seq: u64,
    /// What it says.
    pub batch: EventBatch,
    /// Bytes of all its frames.
    pub bytes: usize,
}

/// What is known of a stock engine.
#[derive(Debug)]
pub(super) struct Stock {
    engine: NativeEngine,
    /// The next seq; `None` before the first.
    next: Option<u64>,
    /// The last messages applied: seq, and the bits of the engine's time.
    recent: VecDeque<(u64, u64)>,
    /// Blocks were stored that were not heard of.
    missed: bool,
    /// The last replay ended without its end marker, and nothing showed since that it was whole.
    cut: bool,
    /// The connection is open.
    up: bool,
    /// There is a replay socket to ask.
    offers_replay: bool,
    /// A replay that is asked for.
    asked: Option<CatchUp>,
    /// Live messages that wait for it.
    held: Backlog<EventBatch>,
    /// Seq and time of the last live message while one is awaited.
    top: Option<(u64, u64)>,
    /// Connected anew with nothing to ask: the other side may be another process whose numbers happen to fit. Its
    /// metrics will tell.
    unsure: bool,
    /// The set is being built from a replay and not shown: what it passes through is the engine's past.
    hidden: bool,
    pulse: pulse::Known,
    changes: Vec<Change>,
}

impl Stock {
    pub(super) fn new(model: String, seed: u64, offers_replay: bool) -> Self {
        Self {
            engine: NativeEngine::new(model, seed, Limits::default()),
            next: None,
            recent: VecDeque::new(),
            missed: false,
            cut: false,
            up: false,
            offers_replay,
            asked: None,
            held: Backlog::default(),
            top: None,
            unsure: false,
            hidden: false,
            pulse: pulse::Known::default(),
            changes: Vec::new(),
        }
    }

    pub(super) fn next(&self) -> u64 {
        self.next.unwrap_or(0)
    }

    pub(super) fn block_size(&self) -> Option<u32> {
        self.engine.block_size()
    }

    pub(super) fn counters(&self) -> Counters {
        *self.engine.counters()
    }

    pub(super) fn lost(&mut self) {
        self.up = false;
        // What waits is in the engine's ring, and may be of a process that is gone by then.
        (self.asked, self.top) = (None, None);
        self.held.clear();
    }

    /// Everything is gone, and what comes next is the middle of a stream.
    pub(super) fn forget(&mut self) {
        self.engine.restart();
        self.next = None;
        self.recent.clear();
        self.missed = true;
        self.cut = false;
        self.asked = None;
        self.held.clear();
        self.top = None;
        self.unsure = false;
        self.hidden = false;
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
        if !self.up {
            return None;
        }
        if self.pulse.mute() {
            return Some(
                "the engine serves prompts and no event of it was heard: are its KV events on, is this their port, \
                 and does each data-parallel rank have its own entry?",
            );
        }
        if self.missed {
            return Some("events are missing: what was stored before is not credited until it is used again");
        }
        if self.cut {
            return Some("a replay ended without its end marker: what it left out is not credited");
        }
        self.engine.mixed().then_some(
            "the engine has window or state groups too: its hits may end before its full-attention blocks do",
        )
    }

    pub(super) fn state(&self) -> ([bool; SetKind::COUNT], EngineState) {
        // Until a replay shows that the other side is the same process, its set may be another one's.
        let sure = !self.unsure && self.asked.as_ref().is_none_or(|asked| !asked.checks());
        let credit = self.up && sure && !self.engine.blind() && !self.engine.lookahead();
        let partial = self.missed || self.cut || self.engine.mixed() || self.engine.blind() || self.engine.lookahead();
        let state = match self.next {
            None => EngineState::Syncing,
            Some(_) if self.asked.is_some() || self.hidden || self.unsure => EngineState::Syncing,
            Some(_) if partial || !credit => EngineState::Partial,
            Some(_) => EngineState::InStep,
        };
        let kinds = [SetKind::Gpu.index(), SetKind::Any.index()];
        (std::array::from_fn(|kind| credit && kinds.contains(&kind)), state)
    }

    /// Was exactly this message applied already?
    fn knows(&self, seq: u64, at: u64) -> bool {
        self.recent.contains(&(seq, at))
    }

    fn remember(&mut self, seq: u64, at: u64) {
        if self.recent.len() == MOST_RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((seq, at));
    }
}

impl Link {
    /// The connection of a stream of the engine's own events is open.
    pub fn connected(&mut self, core: &mut Writer, now_ms: u64, out: &mut Vec<Effect>) {
        let by_pulse = self.entry.address.is_some();
        let Some(stock) = &mut self.stock else { return };
        stock.up = true;
        self.fault.clear();
        self.dirty = true;
        stock.unsure = !stock.offers_replay && stock.next.is_some();
        if by_pulse {
            return self.catch_up(now_ms, out);
        }
        self.heard_ms = Some(now_ms);
        if stock.unsure {
            let outcome = self.hole(core, out);
            self.settle(core, outcome, now_ms);
        }
        self.catch_up(now_ms, out);
    }

    /// One batch of the engine's own events, live.
    pub fn events(&mut self, core: &mut Writer, message: Numbered, now_ms: u64, out: &mut Vec<Effect>) {
        self.dirty = true;
        self.tally.messages += 1;
        self.tally.bytes += message.bytes as u64;
        self.heard_ms = Some(now_ms);
        if self.shed || now_ms < self.rest_until_ms {
            return;
        }
        self.whole_ms = Some(now_ms);
        if let Some(rank) = message.batch.rank {
            self.rank = rank;
        }
        if let Some(stock) = self.stock.as_mut() {
            stock.pulse.heard();
            stock.engine.tick(now_ms);
        }
        let outcome = self.live_events(core, message, now_ms, out);
        self.settle(core, outcome, now_ms);
    }

    fn live_events(
        &mut self,
        core: &mut Writer,
        message: Numbered,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) -> Result<(), Refused> {
        let Some(stock) = self.stock.as_mut() else { return Ok(()) };
        let (seq, at) = (message.seq, message.batch.at.to_bits());
        if stock.asked.is_some() {
            let falls = stock.top.is_some_and(|(top, _)| seq <= top) || seq < stock.next();
            if falls && (stock.knows(seq, at) || stock.top == Some((seq, at))) {
                self.tally.stale += 1;
                return Ok(());
            }
            if falls {
                self.another_life(core, out)?;
            }
            return self.await_turn(message, now_ms, out);
        }
        match stock.next {
            Some(next) if seq == next => self.apply_events(core, seq, message.batch, now_ms),
            Some(next) if seq < next => {
                if stock.knows(seq, at) {
                    self.tally.stale += 1;
                    return Ok(());
                }
                self.another_life(core, out)?;
                self.begin_here(core, message, now_ms, out)
            }
            Some(_) => {
                self.tally.gaps += 1;
                if self.stock.as_ref().is_some_and(|stock| stock.offers_replay) {
                    return self.await_turn(message, now_ms, out);
                }
                self.hole(core, out)?;
                self.begin_here(core, message, now_ms, out)
            }
            None => self.begin_here(core, message, now_ms, out),
        }
    }

    /// The first message of what is known from here on.
    fn begin_here(
        &mut self,
        core: &mut Writer,
        message: Numbered,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) -> Result<(), Refused> {
        let Some(stock) = self.stock.as_mut() else { return Ok(()) };
        if message.seq > 0 && stock.offers_replay {
            return self.await_turn(message, now_ms, out);
        }
        stock.missed = message.seq > 0;
        self.apply_events(core, message.seq, message.batch, now_ms)
    }

    /// Another process speaks: what the one before had is gone at once.
    fn another_life(&mut self, core: &mut Writer, out: &mut Vec<Effect>) -> Result<(), Refused> {
        self.tally.epochs += 1;
        out.push(Effect::EpochEnded);
        self.empty(core)?;
        if let Some(stock) = self.stock.as_mut() {
            stock.missed = false;
            stock.pulse.restarted();
        }
        Ok(())
    }

    /// Messages are missing for good.
    fn hole(&mut self, core: &mut Writer, out: &mut Vec<Effect>) -> Result<(), Refused> {
        out.push(Effect::LivesLost);
        self.empty(core)
    }

    fn empty(&mut self, core: &mut Writer) -> Result<(), Refused> {
        if let Some(stock) = self.stock.as_mut() {
            stock.forget();
        }
        for kind in [SetKind::Gpu, SetKind::Any] {
            if let Some(holder) = self.live[kind.index()].take() {
                core.retire(holder)?;
            }
        }
        Ok(())
    }

    /// Applies a message whose turn it is.
    fn apply_events(&mut self, core: &mut Writer, seq: u64, batch: EventBatch, now_ms: u64) -> Result<(), Refused> {
        let Some(stock) = self.stock.as_mut() else { return Ok(()) };
        stock.next = Some(seq.saturating_add(1));
        stock.remember(seq, batch.at.to_bits());
        stock.cut = false;
        stock.engine.tick(now_ms);
        let mut changes = std::mem::take(&mut stock.changes);
        let cleared = stock.engine.apply(batch, &mut changes);
        if cleared {
            stock.missed = false;
        }
        let shown = !stock.hidden;
        if shown {
            self.show_changes(core, SetKind::Gpu, cleared, &changes)?;
        }
        if let Some(stock) = self.stock.as_mut() {
            stock.changes = changes;
        }
        self.show_any(core, shown)
    }

    /// Carries the changes of the *any* set on.
    fn show_any(&mut self, core: &mut Writer, shown: bool) -> Result<(), Refused> {
        let Some(stock) = self.stock.as_mut() else { return Ok(()) };
        let mut changes = std::mem::take(&mut stock.changes);
        let emptied = stock.engine.any_changes(&mut changes);
        if shown {
            self.show_changes(core, SetKind::Any, emptied, &changes)?;
        }
        if let Some(stock) = self.stock.as_mut() {
            stock.changes = changes;
        }
        Ok(())
    }

    fn show_changes(
        &mut self,
        core: &mut Writer,
        kind: SetKind,
        emptied: bool,
        changes: &[Change],
    ) -> Result<(), Refused> {
        if emptied && let Some(holder) = self.live[kind.index()].take() {
            core.retire(holder)?;
        }
        // Runs of additions and of removals, so that the table is asked once a run; order is kept.
        let mut run: Vec<u64> = Vec::new();
        for part in changes.chunk_by(|a, b| matches!(a, Change::Added { .. }) == matches!(b, Change::Added { .. })) {
            run.clear();
            run.extend(part.iter().map(|change| match change {
                Change::Added { fp, .. } | Change::Removed { fp } => *fp,
            }));
            let holder = self.holder(core, kind)?;
            match part.first() {
                Some(Change::Added { .. }) => core.store(holder, &run)?,
                _ => core.remove(holder, &run)?,
            };
        }
        Ok(())
    }

    /// Time passes for a stream of the engine's own events.
    pub(super) fn stock_tick(&mut self, core: &mut Writer, now_ms: u64, out: &mut Vec<Effect>) {
        let by_pulse = self.entry.address.is_some();
        let Some(stock) = self.stock.as_mut() else { return };
        if stock.up && !by_pulse {
            self.heard_ms = Some(now_ms);
        }
        stock.engine.tick(now_ms);
        let shown = !stock.hidden;
        let outcome = self.show_any(core, shown);
        self.settle(core, outcome, now_ms);
        self.replay_tick(core, now_ms, out);
    }
}

#[cfg(test)]
#[path = "stock/tests.rs"]
mod tests;
