//! Mending what is missing: replays from the agent's ring, snapshots of all sets or of one.

use super::rebuild::{Progress, Rebuild};
use super::{Effect, Link, PAUSE_MS, Replay};
use crate::answer::ResyncReason;
use crate::shared::{Refused, Writer};
use proto::control::{Reply, Request};
use proto::cursor::Step;
use proto::event::Batch;
use proto::id::SetKind;

impl Link {
    /// Replaces one set from a snapshot, beside the live stream.
    pub(super) fn mend(
        &mut self,
        core: &mut Writer,
        kind: SetKind,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) -> Result<(), Refused> {
        let mut kinds = [false; SetKind::COUNT];
        if let Some(rebuild) = &self.rebuild {
            if rebuild.full || rebuild.kinds[kind.index()] {
                return Ok(());
            }
            kinds = rebuild.kinds;
        }
        kinds[kind.index()] = true;
        self.begin(core, kinds, false, ResyncReason::Digest, now_ms, out)
    }

    /// Begins a snapshot, not before `at_ms`.
    pub(super) fn begin(
        &mut self,
        core: &mut Writer,
        kinds: [bool; SetKind::COUNT],
        full: bool,
        reason: ResyncReason,
        at_ms: u64,
        out: &mut Vec<Effect>,
    ) -> Result<(), Refused> {
        self.tally.resyncs[reason as usize] += 1;
        if let Some(mut before) = self.rebuild.take() {
            before.abandon(core)?;
        }
        self.tail.clear();
        if full {
            self.replay = None;
        }
        if full && reason == ResyncReason::Again {
            self.backlog.clear();
        }
        if full && reason == ResyncReason::Gap {
            out.push(Effect::LivesLost);
        }
        self.rebuild = Some(Rebuild::new(kinds, full, self.cursor.next(), at_ms));
        if reason != ResyncReason::Again {
            self.ask_snapshot(at_ms, out);
        }
        Ok(())
    }

    pub(super) fn ask_snapshot(&mut self, now_ms: u64, out: &mut Vec<Effect>) {
        if let Some(rebuild) =
            self.rebuild.as_mut().filter(|rebuild| rebuild.asked.is_none() && now_ms >= rebuild.ask_at_ms)
        {
            self.asks += 1;
            rebuild.asked = Some((self.asks, now_ms));
            out.push(Effect::Ask { id: self.asks, request: Request::Snapshot { cut: None, piece: 0 } });
        }
    }

    /// Asks for what is missing before the backlog, if anything is and nothing is asked yet.
    pub(super) fn ask_replay(&mut self, now_ms: u64, out: &mut Vec<Effect>) {
        let full = self.rebuild.as_ref().is_some_and(|rebuild| rebuild.full);
        if self.replay.is_some() || full || self.backlog.first().is_none() {
            return;
        }
        self.asks += 1;
        let from = self.cursor.next();
        self.replay = Some(Replay { id: self.asks, asked_ms: now_ms, from });
        out.push(Effect::Ask { id: self.asks, request: Request::Replay { from } });
    }

    pub(super) fn answered(
        &mut self,
        core: &mut Writer,
        id: u64,
        reply: Reply,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) -> Result<(), Refused> {
        if self.replay.is_some_and(|replay| replay.id == id) {
            return self.replayed(core, reply, now_ms, out);
        }
        let asked = self.rebuild.as_ref().and_then(|rebuild| rebuild.asked).map(|(asked, _)| asked);
        if asked != Some(id) {
            return Ok(()); // An answer that is not waited for any more.
        }
        let piece = match reply {
            Reply::Snapshot(piece) => piece,
            Reply::Refused { reason } => {
                self.failed(core, id, &format!("the agent refused: {reason}"), now_ms, out);
                return Ok(());
            }
            _ => return self.start_over(core, now_ms, out),
        };
        match self.cursor.epoch() {
            // The stream will tell of the new life presently; a snapshot of it serves as well.
            Some(mine) if piece.epoch > mine => {
                self.restart(core, piece.epoch, 1, now_ms, out)?;
                return Ok(());
            }
            Some(mine) if piece.epoch == mine => {}
            _ => return self.start_over(core, now_ms, out),
        }
        let (slot, Some(rebuild)) = (self.slot, self.rebuild.as_mut()) else { return Ok(()) };
        match rebuild.piece(core, slot, piece)? {
            Progress::Broken => self.start_over(core, now_ms, out),
            Progress::Next(cut, piece) => {
                self.asks += 1;
                rebuild.asked = Some((self.asks, now_ms));
                out.push(Effect::Ask { id: self.asks, request: Request::Snapshot { cut: Some(cut), piece } });
                Ok(())
            }
            Progress::Whole(next) => self.swap(core, next, now_ms, out),
        }
    }

    fn start_over(&mut self, core: &mut Writer, now_ms: u64, out: &mut Vec<Effect>) -> Result<(), Refused> {
        let Some((kinds, full)) = self.rebuild.as_ref().map(|rebuild| (rebuild.kinds, rebuild.full)) else {
            return Ok(());
        };
        self.begin(core, kinds, full, ResyncReason::Again, now_ms + PAUSE_MS, out)
    }

    /// The snapshot is whole: what was built becomes live.
    fn swap(&mut self, core: &mut Writer, next: u64, now_ms: u64, out: &mut Vec<Effect>) -> Result<(), Refused> {
        let (Some(epoch), Some(mut rebuild)) = (self.cursor.epoch(), self.rebuild.take()) else { return Ok(()) };
        // A cut older than what was applied when it was asked for cannot be brought up to date.
        if next < rebuild.tail_from {
            self.rebuild = Some(rebuild);
            return self.start_over(core, now_ms, out);
        }
        if !rebuild.full {
            for (_, batch) in self.tail.from(next) {
                rebuild.follow(core, self.slot, batch)?;
            }
        }
        rebuild.publish(core, &mut self.live)?;
        self.tail.clear();
        for kind in SetKind::ALL.into_iter().filter(|kind| rebuild.kinds[kind.index()]) {
            self.withheld[kind.index()] = false;
            self.from[kind.index()] = next;
        }
        if rebuild.full {
            self.fault.clear();
            // The agent's own digests of the cut were met, kind by kind.
            self.proven = Some(true);
            self.cursor.restart(epoch, next);
            self.drain(core, now_ms, out)?;
            self.caught_up(now_ms);
            self.ask_replay(now_ms, out);
        }
        Ok(())
    }

    fn replayed(&mut self, core: &mut Writer, reply: Reply, now_ms: u64, out: &mut Vec<Effect>) -> Result<(), Refused> {
        let Some(replay) = self.replay.take() else { return Ok(()) };
        if let Reply::Replay { epoch, from, payloads, .. } = reply
            && Some(epoch) == self.cursor.epoch()
        {
            for (seq, payload) in (from..).zip(&payloads) {
                let Ok(batch) = Batch::decode(payload) else { break };
                if batch.epoch != epoch {
                    break;
                }
                self.tally.messages += 1;
                self.tally.bytes += payload.len() as u64;
                // Not `take`: a hole inside the answer must not ask for another replay.
                match self.cursor.step(epoch, seq) {
                    Step::Contiguous => {
                        self.notice(&batch, seq, out);
                        self.apply(core, seq, batch, now_ms, out)?;
                    }
                    Step::Stale => {}
                    _ => break,
                }
            }
            self.drain(core, now_ms, out)?;
            if self.backlog.first().is_none() {
                self.tally.replays += 1;
                self.caught_up(now_ms);
                return Ok(());
            }
            if self.cursor.next() > replay.from {
                self.ask_replay(now_ms, out);
                return Ok(());
            }
        }
        self.begin(core, [true; SetKind::COUNT], true, ResyncReason::Gap, now_ms, out)
    }
}
