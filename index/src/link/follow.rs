//! Following a stream: whose turn is it, what waits, what is applied, and do the digests agree?

use super::backlog::{Backlog, Kept};
use super::{Effect, LONGEST_REPLAY, Link, PAUSE_MS, verdict};
use crate::answer::ResyncReason;
use crate::shared::{Holder, Refused, Writer};
use proto::cursor::{Cursor, Step};
use proto::event::{Batch, Op, State};
use proto::id::{Epoch, SetKind};
use std::sync::Arc;

impl Link {
    pub(super) fn take(
        &mut self,
        core: &mut Writer,
        seq: u64,
        batch: Batch,
        bytes: usize,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) -> Result<(), Refused> {
        if self.shed || now_ms < self.rest_until_ms {
            self.heard_ms = Some(now_ms);
            self.notice(&batch, seq, out);
            return Ok(());
        }
        match self.cursor.epoch() {
            Some(mine) if batch.epoch < mine => {
                self.tally.foreign += 1;
                // Right after a restart it may be an old message on its way.
                if now_ms.saturating_sub(self.since_ms) > self.setting.leases.stale_ms {
                    self.ignored = Some((batch.epoch, now_ms));
                }
                return Ok(());
            }
            Some(mine) if batch.epoch == mine => {}
            _ => self.restart(core, batch.epoch, seq, now_ms, out)?,
        }
        self.heard_ms = Some(now_ms);
        if self.rebuild.as_ref().is_some_and(|rebuild| rebuild.full) {
            return self.hold(core, seq, batch, bytes, now_ms, out);
        }
        match self.cursor.step(batch.epoch, seq) {
            Step::Contiguous => {
                self.notice(&batch, seq, out);
                self.apply(core, seq, batch, now_ms, out)?;
                self.drain(core, now_ms, out)?;
                self.caught_up(now_ms);
                Ok(())
            }
            Step::Gap { first, last } => {
                if self.replay.is_none() {
                    self.tally.gaps += 1;
                }
                if last - first >= LONGEST_REPLAY {
                    self.begin(core, [true; SetKind::COUNT], true, ResyncReason::Gap, now_ms, out)?;
                }
                self.hold(core, seq, batch, bytes, now_ms, out)?;
                self.ask_replay(now_ms, out);
                Ok(())
            }
            Step::Stale => {
                self.tally.stale += 1;
                Ok(())
            }
            // Judged above.
            Step::Restarted | Step::Foreign => Ok(()),
        }
    }

    /// Another process life: what was held is gone at once.
    pub(super) fn restart(
        &mut self,
        core: &mut Writer,
        epoch: Epoch,
        seq: u64,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) -> Result<(), Refused> {
        let reason = match self.cursor.epoch() {
            Some(_) => ResyncReason::Restart,
            None => ResyncReason::First,
        };
        if reason == ResyncReason::Restart {
            out.push(Effect::EpochEnded);
        }
        self.forget(core)?;
        self.tally.epochs += 1;
        self.fault.clear();
        // Not known, and not to be trusted, before it says so itself.
        self.mismatch = None;
        self.heartbeat_at = None;
        self.cursor = Cursor::at(epoch, 0);
        self.since_ms = now_ms;
        self.from = [0; SetKind::COUNT];
        // Who hears seq 0 has missed nothing: sets are empty when a process starts.
        if seq > 0 {
            self.begin(core, [true; SetKind::COUNT], true, reason, now_ms, out)?;
        }
        Ok(())
    }

    /// What a message says beside its changes: taken at once, whether or not its turn has come.
    pub(super) fn notice(&mut self, batch: &Batch, seq: u64, out: &mut Vec<Effect>) {
        for op in &batch.ops {
            match op {
                Op::Life(life) => out.push(Effect::Life(life.clone())),
                Op::State(state)
                    if self.heartbeat_at.is_none_or(|at| at < (batch.epoch, seq) || at.0 != batch.epoch) =>
                {
                    // Judged once a process life, and again if what is judged changes: finding out what differs is work.
                    let names =
                        |state: &State| (state.check, state.block_size, state.engine.rank, state.models.clone());
                    let judged = self.heartbeat_at.is_some_and(|(epoch, _)| epoch == batch.epoch)
                        && self.heartbeat.as_deref().is_some_and(|before| names(before) == names(state));
                    if !judged {
                        self.mismatch = verdict::rank(state, self.told_rank)
                            .or_else(|| verdict::mismatch(state, self.setting.seed));
                    }
                    self.heartbeat_at = Some((batch.epoch, seq));
                    self.rank = self.told_rank.unwrap_or(state.engine.rank);
                    self.heartbeat = Some(Arc::new((**state).clone()));
                }
                _ => {}
            }
        }
    }

    /// Keeps a message for its turn.
    pub(super) fn hold(
        &mut self,
        core: &mut Writer,
        seq: u64,
        batch: Batch,
        bytes: usize,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) -> Result<(), Refused> {
        let mut said = Vec::new();
        let known = seq < self.cursor.next();
        if !known {
            self.notice(&batch, seq, &mut said);
        }
        match if known { Kept::Known } else { self.backlog.keep(seq, batch, bytes) } {
            Kept::New => out.append(&mut said),
            Kept::Known => self.tally.stale += 1,
            Kept::Full => {
                out.append(&mut said);
                // Too much arrived meanwhile: a later cut will have it all, this message too.
                self.begin(core, [true; SetKind::COUNT], true, ResyncReason::Again, now_ms + PAUSE_MS, out)?;
            }
        }
        Ok(())
    }

    /// Applies one message whose turn it is.
    pub(super) fn apply(
        &mut self,
        core: &mut Writer,
        seq: u64,
        batch: Batch,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) -> Result<(), Refused> {
        let mut differs = [false; SetKind::COUNT];
        for op in &batch.ops {
            match op {
                Op::Store(store) if seq >= self.from[store.kind.index()] => {
                    let holder = self.holder(core, store.kind)?;
                    core.store(holder, &store.fingerprints.0)?;
                }
                Op::Remove(remove) if seq >= self.from[remove.kind.index()] => {
                    let holder = self.holder(core, remove.kind)?;
                    core.remove(holder, &remove.fingerprints.0)?;
                }
                Op::Clear(clear) => {
                    for kind in SetKind::ALL {
                        let at = kind.index();
                        if clear.kind.is_none_or(|one| one == kind) && seq >= self.from[at] {
                            if let Some(holder) = self.live[at].take() {
                                core.retire(holder)?;
                            }
                            // Empty is empty: whatever differed before is gone.
                            self.withheld[at] = false;
                        }
                    }
                }
                Op::State(state) => self.compare(core, seq, state, &mut differs)?,
                _ => {}
            }
        }
        if self.rebuild.is_some() && keep_applied(&mut self.tail, seq, batch) == Kept::Full {
            let kinds = self.rebuild.as_ref().map_or([true; SetKind::COUNT], |rebuild| rebuild.kinds);
            self.begin(core, kinds, false, ResyncReason::Again, now_ms + PAUSE_MS, out)?;
        }
        for kind in SetKind::ALL {
            if differs[kind.index()] {
                self.mend(core, kind, now_ms, out)?;
            }
        }
        Ok(())
    }

    pub(super) fn holder(&mut self, core: &mut Writer, kind: SetKind) -> Result<Holder, Refused> {
        match self.live[kind.index()] {
            Some(holder) => Ok(holder),
            None => {
                let holder = core.open(self.slot, kind)?;
                self.live[kind.index()] = Some(holder);
                core.publish(holder)?;
                Ok(holder)
            }
        }
    }

    /// Compares a heartbeat's digests with the table's, at the same seq.
    fn compare(
        &mut self,
        core: &mut Writer,
        seq: u64,
        state: &State,
        differs: &mut [bool; SetKind::COUNT],
    ) -> Result<(), Refused> {
        let mut compared = false;
        let mut equal = true;
        for told in &state.digests {
            let at = told.kind.index();
            // A set that came from a later cut is ahead of this message.
            if seq + 1 < self.from[at] {
                continue;
            }
            let own = match self.live[at] {
                Some(holder) => core.digest(holder)?,
                None => Default::default(),
            };
            compared = true;
            self.tally.digest_checks += 1;
            if own == told.digest {
                self.withheld[at] = false;
                continue;
            }
            equal = false;
            if !self.withheld[at] {
                self.withheld[at] = true;
                self.tally.digest_failures += 1;
            }
            differs[at] = self.rebuild.as_ref().is_none_or(|rebuild| !rebuild.kinds[at]);
        }
        if compared {
            self.proven = Some(equal);
            if equal {
                self.fault.clear();
            }
        }
        Ok(())
    }

    /// Applies what waits in the backlog and whose turn has come.
    pub(super) fn drain(&mut self, core: &mut Writer, now_ms: u64, out: &mut Vec<Effect>) -> Result<(), Refused> {
        while let (Some(epoch), Some(batch)) = (self.cursor.epoch(), self.backlog.take(self.cursor.next())) {
            let seq = self.cursor.next();
            self.cursor.step(epoch, seq);
            self.apply(core, seq, batch, now_ms, out)?;
        }
        if self.backlog.first().is_none() {
            self.replay = None;
        }
        Ok(())
    }

    /// Notes that nothing is missing now.
    pub(super) fn caught_up(&mut self, now_ms: u64) {
        if self.backlog.first().is_none() && !self.rebuild.as_ref().is_some_and(|rebuild| rebuild.full) {
            self.whole_ms = Some(now_ms);
        }
    }
}

/// Keeps a message that was applied, for a set that is built beside. Only its changes weigh.
fn keep_applied(tail: &mut Backlog, seq: u64, batch: Batch) -> Kept {
    let weight = |op: &Op| match op {
        Op::Store(store) => store.fingerprints.0.len() * 8,
        Op::Remove(remove) => remove.fingerprints.0.len() * 8,
        _ => 64,
    };
    let bytes = batch.ops.iter().map(weight).sum();
    tail.keep(seq, batch, bytes)
}
