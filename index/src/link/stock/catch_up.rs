//! Catching up by the engine's replay: after a gap, after a connection was lost, and for who comes late.
//!
//! A replay is asked from the message that was applied last, not from the first missing one: the engine keeps its
//! newest messages, so a replay that does not begin with exactly that message is another process's, however its
//! numbers fit. Live messages wait meanwhile and are applied strictly in order. vLLM's replay socket drops what its
//! reader is slow to take (1,000 messages up to 0.32), with or without its end marker: what is missing then is asked
//! for again as long as that brings anything. What stays missing empties the set.

use super::super::backlog::Kept;
use super::super::{Effect, Link};
use super::Numbered;
use crate::answer::NATIVE_SILENT_MS;
use crate::shared::{Refused, Writer};
use proto::id::SetKind;

/// How long a replay may be silent, in milliseconds. Its socket has a shorter deadline; this one covers an ask that was
/// lost on the way to it.
const SILENCE_MS: u64 = 10_000;
/// Pause before an ask that brought nothing is repeated, in milliseconds.
const PAUSE_MS: u64 = 200;
/// How often an ask is repeated that brings nothing.
const MOST_TRIES: u32 = 2;

/// A replay that is wanted.
#[derive(Debug, Clone, Copy)]
pub(super) struct CatchUp {
    /// Its number, once it is asked for.
    id: Option<u64>,
    /// Not before.
    at_ms: u64,
    heard_ms: u64,
    from: u64,
    /// The time of message `from`, which was applied: the first reply must be that very message.
    check: Option<u64>,
    /// Did it bring a message that was missing?
    brought: bool,
    tries: u32,
}

impl CatchUp {
    /// Is it still open whether the other side is the process that is followed?
    pub(super) fn checks(&self) -> bool {
        self.check.is_some()
    }
}

impl Link {
    /// Asks for what is missing, if there is anybody to ask.
    pub(super) fn catch_up(&mut self, now_ms: u64, out: &mut Vec<Effect>) {
        self.catch_up_again(0, now_ms, out);
    }

    fn catch_up_again(&mut self, tries: u32, now_ms: u64, out: &mut Vec<Effect>) {
        let Some(stock) = self.stock.as_mut().filter(|stock| stock.offers_replay) else { return };
        let last = stock.recent.back().copied().filter(|(seq, _)| Some(seq + 1) == stock.next);
        stock.asked = Some(CatchUp {
            id: None,
            at_ms: if tries > 0 { now_ms + PAUSE_MS } else { now_ms },
            heard_ms: now_ms,
            from: last.map_or(stock.next(), |(seq, _)| seq),
            check: last.map(|(_, at)| at),
            brought: false,
            tries,
        });
        // From the very start: the states that are passed through are the engine's past.
        stock.hidden |= stock.next.is_none();
        self.ask_events(now_ms, out);
    }

    fn ask_events(&mut self, now_ms: u64, out: &mut Vec<Effect>) {
        let Some(asked) = self.stock.as_mut().and_then(|stock| stock.asked.as_mut()) else { return };
        if asked.id.is_none() && now_ms >= asked.at_ms {
            self.asks += 1;
            asked.id = Some(self.asks);
            asked.heard_ms = now_ms;
            out.push(Effect::Events { id: self.asks, from: asked.from });
        }
    }

    /// Keeps a live message until its turn comes, and sees to it that what comes before it is asked for.
    pub(super) fn await_turn(&mut self, message: Numbered, now_ms: u64, out: &mut Vec<Effect>) -> Result<(), Refused> {
        let Numbered { seq, batch, bytes } = message;
        let Some(stock) = self.stock.as_mut() else { return Ok(()) };
        stock.top = Some((seq, batch.at.to_bits()));
        // What there is no room for is in the engine's ring, and asked for again.
        let _: Kept = stock.held.keep(seq, batch, bytes);
        if stock.asked.is_none() {
            self.catch_up(now_ms, out);
        }
        Ok(())
    }

    /// One message of the replay of this number.
    pub fn replayed_events(
        &mut self,
        core: &mut Writer,
        id: u64,
        message: Numbered,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) {
        let Numbered { seq, batch, bytes } = message;
        let Some(stock) = self.stock.as_mut() else { return };
        let Some(asked) = stock.asked.as_mut().filter(|asked| asked.id == Some(id)) else { return };
        asked.heard_ms = now_ms;
        self.heard_ms = Some(now_ms);
        self.dirty = true;
        self.tally.messages += 1;
        self.tally.bytes += bytes as u64;
        if let Some(at) = asked.check.take_if(|_| seq == asked.from) {
            let outcome = match at == batch.at.to_bits() {
                true => Ok(()),
                false => self.replay_of_another(core, true, now_ms, out),
            };
            return self.settle(core, outcome, now_ms);
        }
        if asked.check.is_some() {
            // The ring begins after what was applied: too much is missing.
            let outcome = self.replay_of_another(core, false, now_ms, out);
            return self.settle(core, outcome, now_ms);
        }
        let outcome = match stock.next {
            Some(next) if seq < next => Ok(()),
            Some(next) if seq > next => {
                let _: Kept = stock.held.keep(seq, batch, bytes);
                Ok(())
            }
            next => {
                if next.is_none() {
                    stock.missed = seq > 0;
                }
                asked.brought = true;
                self.apply_events(core, seq, batch, now_ms)
            }
        };
        self.settle(core, outcome, now_ms);
    }

    /// The other side's replay does not go on from what was applied: everything from its start is taken instead.
    fn replay_of_another(
        &mut self,
        core: &mut Writer,
        life: bool,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) -> Result<(), Refused> {
        let held = self.stock.as_mut().map(|stock| (std::mem::take(&mut stock.held), stock.top));
        if life {
            self.another_life(core, out)?
        } else {
            self.hole(core, out)?
        }
        if let (Some(stock), Some((held, top))) = (self.stock.as_mut(), held) {
            (stock.held, stock.top) = (held, top);
        }
        self.catch_up(now_ms, out);
        Ok(())
    }

    /// The replay of this number is over. `whole`: with its end marker.
    pub fn replay_over(
        &mut self,
        core: &mut Writer,
        id: u64,
        whole: bool,
        reason: &str,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) {
        let Some(stock) = self.stock.as_mut() else { return };
        let Some(asked) = stock.asked.filter(|asked| asked.id == Some(id)) else { return };
        self.dirty = true;
        if !whole {
            self.fault = format!("a replay was cut short: {reason}");
        }
        let outcome = if whole && asked.checks() {
            // Nothing from the last applied message on: this process has not come so far yet.
            self.replay_of_another(core, true, now_ms, out)
        } else {
            self.after_replay(core, asked, whole, now_ms, out)
        };
        self.settle(core, outcome, now_ms);
    }

    fn after_replay(
        &mut self,
        core: &mut Writer,
        asked: CatchUp,
        whole: bool,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) -> Result<(), Refused> {
        self.drain_events(core, now_ms)?;
        let Some(stock) = self.stock.as_mut() else { return Ok(()) };
        let behind = stock.top.is_some_and(|(top, _)| top >= stock.next()) || stock.held.first().is_some();
        let may_ask = asked.brought || asked.tries < MOST_TRIES;
        if (behind || !whole) && may_ask {
            let tries = if asked.brought { 0 } else { asked.tries + 1 };
            self.catch_up_again(tries, now_ms, out);
            return Ok(());
        }
        stock.asked = None;
        if !behind {
            stock.next.get_or_insert(0);
            stock.cut = !whole;
            self.tally.replays += u64::from(whole);
            if whole {
                self.fault.clear();
            }
            return self.unveil(core);
        }
        // What is missing stays so: what came before it may be gone by now.
        let (held, top) = (std::mem::take(&mut stock.held), stock.top.take());
        self.hole(core, out)?;
        let Some(stock) = self.stock.as_mut() else { return Ok(()) };
        (stock.held, stock.hidden) = (held, true);
        while let Some(first) = self.stock.as_ref().and_then(|stock| stock.held.first()) {
            if let Some(stock) = self.stock.as_mut().filter(|stock| stock.next != Some(first)) {
                stock.engine.restart();
                (stock.next, stock.missed) = (Some(first), first > 0);
            }
            self.drain_events(core, now_ms)?;
        }
        if let (Some(stock), Some((top, _))) = (self.stock.as_mut(), top)
            && top >= stock.next()
        {
            // There was no room for the newest ones.
            stock.engine.restart();
            (stock.next, stock.missed) = (Some(top + 1), true);
        }
        self.unveil(core)
    }

    /// Applies what waits and whose turn has come.
    fn drain_events(&mut self, core: &mut Writer, now_ms: u64) -> Result<(), Refused> {
        loop {
            let Some(stock) = self.stock.as_mut() else { return Ok(()) };
            let seq = match (stock.next, stock.held.first()) {
                (Some(next), _) => next,
                // Nothing was replayed: who hears the first message has missed nothing.
                (None, Some(0)) => 0,
                (None, _) => return Ok(()),
            };
            let Some(batch) = stock.held.take(seq) else { return Ok(()) };
            self.apply_events(core, seq, batch, now_ms)?;
        }
    }

    /// Shows what was built.
    fn unveil(&mut self, core: &mut Writer) -> Result<(), Refused> {
        let slot = self.slot;
        let Some(stock) = self.stock.as_mut() else { return Ok(()) };
        stock.top = None;
        if !std::mem::take(&mut stock.hidden) {
            return Ok(());
        }
        for (kind, set) in [(SetKind::Gpu, Some(stock.engine.residency())), (SetKind::Any, stock.engine.any())] {
            let before = self.live[kind.index()].take();
            let Some(set) = set.filter(|set| set.reachable() > 0) else {
                if let Some(before) = before {
                    core.retire(before)?;
                }
                continue;
            };
            let holder = core.open(slot, kind)?;
            let mut stored = Ok(());
            set.chains(|_, run| {
                if stored.is_ok() {
                    stored = core.store(holder, run).map(|_| ());
                }
            });
            self.live[kind.index()] = Some(holder);
            stored?;
            core.publish(holder)?;
        }
        Ok(())
    }

    pub(super) fn replay_tick(&mut self, core: &mut Writer, now_ms: u64, out: &mut Vec<Effect>) {
        let Some(stock) = self.stock.as_ref() else { return };
        match stock.asked {
            Some(asked) => {
                if let Some(id) = asked.id.filter(|_| now_ms.saturating_sub(asked.heard_ms) > SILENCE_MS) {
                    self.replay_over(core, id, false, "no answer in time", now_ms, out);
                }
                self.ask_events(now_ms, out);
            }
            // After a purge for silence, or a process known by its metrics.
            None => {
                let heard = self.heard_ms.is_some_and(|at| now_ms.saturating_sub(at) <= NATIVE_SILENT_MS);
                if stock.up && stock.next.is_none() && heard && !self.shed && now_ms >= self.rest_until_ms {
                    self.catch_up(now_ms, out);
                }
            }
        }
    }
}
