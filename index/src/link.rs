//! One engine's stream as a state machine: messages, answers of the agent and time in; changes of the table and asks out.
//!
//! A stream is followed message by message. What is missing is fetched from the agent's ring (a *replay*) or replaced
//! by a *snapshot*, which is built in hidden holders beside the live ones and swapped in. Every heartbeat's digests
//! are compared with the table's own at the same seq. A set whose digest differed is credited nothing until it is
//! replaced; the other sets of the engine, and other engines, are not touched.

pub mod backlog;
mod follow;
mod mend;
pub mod rebuild;
pub mod stock;
pub mod verdict;

use crate::answer::{EngineState, Leases, ResyncReason, Status, Tally};
use crate::shared::{Holder, Refused, Writer};
use backlog::Backlog;
use proto::control::{Reply, Request};
use proto::cursor::Cursor;
use proto::event::{Batch, Life, State};
use proto::fleet::{Entry, Source};
use proto::id::{EngineId, Epoch, SetKind};
use rebuild::Rebuild;
use std::sync::Arc;
use stock::Stock;

/// Longest gap that a replay is asked for, in messages: half a minute of a stream; a snapshot is cheaper beyond.
pub const LONGEST_REPLAY: u64 = 1024;
/// How long an answer may take before it is asked again, in milliseconds. The control connection has shorter
/// deadlines of its own; this one covers an ask that was lost on the way to it.
pub const ASK_DEADLINE_MS: u64 = 5000;
/// Pause before a snapshot that broke is begun again, in milliseconds.
pub const PAUSE_MS: u64 = 200;
/// How often the agent is told how far its stream was read, in milliseconds.
pub const ACK_EVERY_MS: u64 = 1000;

/// What the world is to do for a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Ask the agent. The answer (or the failure) comes back with this number.
    Ask {
        /// Of this link; never used twice.
        id: u64,
        /// What to ask.
        request: Request,
    },
    /// Tell how far the stream was read; the answer is not waited for.
    Ack(Request),
    /// Ask a stock engine for its events from this seq on.
    Events {
        /// Of this link; never used twice.
        id: u64,
        /// The first seq.
        from: u64,
    },
    /// A step in a request's life.
    Life(Life),
    /// The engine's process life ended: its placements end.
    EpochEnded,
    /// Messages are missing for good, lives of requests perhaps among them: what was placed before may be over.
    LivesLost,
}

/// What all links share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// The deployment's seed.
    pub seed: u64,
    /// Silences.
    pub leases: Leases,
    /// This index's random number, for acks.
    pub reader: u64,
}

/// A replay under way.
#[derive(Debug, Clone, Copy)]
struct Replay {
    id: u64,
    asked_ms: u64,
    from: u64,
}

/// One engine's stream.
#[derive(Debug)]
pub struct Link {
    setting: Setting,
    entry: Entry,
    slot: u32,
    rank: u32,
    /// The rank that the list, or the connection, says; an agent that says another one is not believed.
    told_rank: Option<u32>,
    cursor: Cursor,
    /// When the epoch was taken up.
    since_ms: u64,
    live: [Option<Holder>; SetKind::COUNT],
    /// Operations of a kind in messages before this seq are in its set already.
    from: [u64; SetKind::COUNT],
    backlog: Backlog,
    /// What was applied since a rebuild beside the live stream was asked for.
    tail: Backlog,
    replay: Option<Replay>,
    rebuild: Option<Rebuild>,
    /// Kinds whose digest differed.
    withheld: [bool; SetKind::COUNT],
    proven: Option<bool>,
    heartbeat: Option<Arc<State>>,
    /// Seq and epoch of that heartbeat.
    heartbeat_at: Option<(Epoch, u64)>,
    /// What differs between this engine's fingerprints and ours.
    mismatch: Option<String>,
    /// What else is to be said.
    fault: String,
    heard_ms: Option<u64>,
    whole_ms: Option<u64>,
    ignored: Option<(Epoch, u64)>,
    /// After a refusal of the core nothing is followed until then.
    rest_until_ms: u64,
    acked_ms: u64,
    asks: u64,
    shed: bool,
    /// Of a stream of the engine's own events.
    stock: Option<Box<Stock>>,
    dirty: bool,
    shown: Option<EngineState>,
    tally: Tally,
}

impl Link {
    /// A link that has heard nothing. `slot` is the engine's number in the table.
    pub fn new(setting: Setting, entry: Entry, slot: u32) -> Self {
        let native = entry.source == Source::Native;
        let model = entry.model.clone().unwrap_or_default();
        Self {
            stock: native.then(|| Box::new(Stock::new(model, setting.seed, entry.replay.is_some()))),
            setting,
            rank: entry.rank.unwrap_or(0),
            told_rank: entry.rank,
            entry,
            slot,
            cursor: Cursor::default(),
            since_ms: 0,
            live: [None; SetKind::COUNT],
            from: [0; SetKind::COUNT],
            backlog: Backlog::default(),
            tail: Backlog::default(),
            replay: None,
            rebuild: None,
            withheld: [false; SetKind::COUNT],
            proven: None,
            heartbeat: None,
            heartbeat_at: None,
            mismatch: None,
            fault: String::new(),
            heard_ms: None,
            whole_ms: None,
            ignored: None,
            rest_until_ms: 0,
            acked_ms: 0,
            asks: 0,
            shed: false,
            dirty: true,
            shown: None,
            tally: Tally::default(),
        }
    }

    /// The fleet entry.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// Takes over an entry that differs only in what people read: address, labels, model.
    pub fn rename(&mut self, entry: Entry) {
        self.entry = entry;
        self.dirty = true;
    }

    /// The engine's number in the table.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// `name.rank`.
    pub fn engine(&self) -> EngineId {
        EngineId::new(self.entry.name.clone(), self.rank)
    }

    /// The live holder of a kind.
    pub fn live(&self, kind: SetKind) -> Option<Holder> {
        self.live[kind.index()]
    }

    /// The next seq expected: everything before it is applied.
    pub fn next(&self) -> u64 {
        self.stock.as_ref().map_or(self.cursor.next(), |stock| stock.next())
    }

    /// When the last message was received.
    pub fn heard_ms(&self) -> Option<u64> {
        self.heard_ms
    }

    /// The engine dialled in, as this rank.
    pub fn dialled(&mut self, rank: u32) {
        (self.rank, self.told_rank, self.dirty) = (rank, Some(rank), true);
    }

    /// Another process claims this engine's name, and is not followed.
    pub fn claimed(&mut self, epoch: Epoch, now_ms: u64) {
        self.ignored = Some((epoch, now_ms));
        self.dirty = true;
    }

    /// The connection is lost or cannot be made.
    pub fn away(&mut self, reason: String) {
        self.dirty = true;
        if let Some(stock) = &mut self.stock {
            stock.lost();
        }
        self.fault = reason;
    }

    /// The last heartbeat.
    pub fn heartbeat(&self) -> Option<&Arc<State>> {
        self.heartbeat.as_ref()
    }

    /// Did anything that readers see change since this was last asked?
    pub fn take_dirty(&mut self) -> bool {
        std::mem::take(&mut self.dirty)
    }

    /// One message of the stream, of so many payload bytes.
    pub fn receive(
        &mut self,
        core: &mut Writer,
        seq: u64,
        batch: Batch,
        bytes: usize,
        now_ms: u64,
        out: &mut Vec<Effect>,
    ) {
        self.dirty = true;
        self.tally.messages += 1;
        self.tally.bytes += bytes as u64;
        let outcome = self.take(core, seq, batch, bytes, now_ms, out);
        self.settle(core, outcome, now_ms);
    }

    /// The agent's answer to the ask of this number.
    pub fn reply(&mut self, core: &mut Writer, id: u64, reply: Reply, now_ms: u64, out: &mut Vec<Effect>) {
        self.dirty = true;
        let outcome = self.answered(core, id, reply, now_ms, out);
        self.settle(core, outcome, now_ms);
    }

    /// The ask of this number was not answered: no connection, no answer in time, or one that makes no sense.
    pub fn failed(&mut self, core: &mut Writer, id: u64, reason: &str, now_ms: u64, out: &mut Vec<Effect>) {
        self.dirty = true;
        if let Some(rebuild) =
            self.rebuild.as_mut().filter(|rebuild| rebuild.asked.is_some_and(|(asked, _)| asked == id))
        {
            self.fault = format!("no snapshot yet: {reason}");
            rebuild.asked = None;
            rebuild.ask_at_ms = now_ms + PAUSE_MS;
            let outcome = rebuild.abandon(core);
            self.settle(core, outcome, now_ms);
        } else if self.replay.is_some_and(|replay| replay.id == id) {
            let outcome = self.begin(core, [true; SetKind::COUNT], true, ResyncReason::Gap, now_ms, out);
            self.settle(core, outcome, now_ms);
        }
    }

    /// Bytes came that are no message. `version`: they are of a protocol that this index does not speak.
    pub fn bad(&mut self, reason: String, version: bool, now_ms: u64) {
        self.dirty = true;
        self.tally.bad += 1;
        if version {
            self.heard_ms = Some(now_ms);
            self.mismatch = Some(reason);
            self.heartbeat_at = None;
        } else {
            self.fault = reason;
        }
    }

    /// Time passed.
    pub fn tick(&mut self, core: &mut Writer, now_ms: u64, out: &mut Vec<Effect>) {
        self.stock_tick(core, now_ms, out);
        let follows = self.cursor.epoch().is_some() || self.live.iter().any(Option::is_some);
        if self.heard_ms.is_some_and(|at| now_ms.saturating_sub(at) > self.setting.leases.lease_ms) && follows {
            let outcome = self.forget(core);
            self.settle(core, outcome, now_ms);
            out.push(Effect::EpochEnded);
        }
        if self.ignored.is_some_and(|(_, at)| now_ms.saturating_sub(at) > self.setting.leases.lease_ms) {
            self.ignored = None;
            self.dirty = true;
        }
        let overdue = |asked_ms: u64| now_ms.saturating_sub(asked_ms) > ASK_DEADLINE_MS;
        if let Some((id, _)) = self.rebuild.as_ref().and_then(|rebuild| rebuild.asked).filter(|(_, at)| overdue(*at)) {
            self.failed(core, id, "no answer in time", now_ms, out);
        }
        if let Some(replay) = self.replay.filter(|replay| overdue(replay.asked_ms)) {
            self.failed(core, replay.id, "no answer in time", now_ms, out);
        }
        self.ask_snapshot(now_ms, out);
        if let (Some(epoch), true) = (self.cursor.epoch(), now_ms.saturating_sub(self.acked_ms) >= ACK_EVERY_MS) {
            self.acked_ms = now_ms;
            out.push(Effect::Ack(Request::Ack { reader: self.setting.reader, epoch, next: self.cursor.next() }));
        }
        let state = self.state().1;
        let shown = self.status_state(state, now_ms);
        if self.shown != Some(shown) {
            self.shown = Some(shown);
            self.dirty = true;
        }
    }

    /// A recount of the table differed from the digest kept for this holder: a fault of the index itself.
    pub fn miscounted(&mut self, core: &mut Writer, kind: SetKind, now_ms: u64, out: &mut Vec<Effect>) {
        self.dirty = true;
        self.withheld[kind.index()] = true;
        let outcome = self.mend(core, kind, now_ms, out);
        self.settle(core, outcome, now_ms);
    }

    /// Gives up everything that the table holds for this engine, for want of room.
    pub fn shed(&mut self, core: &mut Writer, now_ms: u64) {
        let outcome = self.forget(core);
        self.settle(core, outcome, now_ms);
        self.shed = true;
        self.fault = "dropped because the index was over its byte budget (memory_bytes)".into();
    }

    /// There is room again.
    pub fn admit(&mut self) {
        if std::mem::take(&mut self.shed) {
            self.fault.clear();
            self.dirty = true;
        }
    }

    /// Was it given up for want of room?
    pub fn is_shed(&self) -> bool {
        self.shed
    }

    /// The engine leaves the fleet: everything it has goes.
    ///
    /// # Errors
    /// When a holder of it is not known to the core: a fault of the index.
    pub fn forget(&mut self, core: &mut Writer) -> Result<(), Refused> {
        self.dirty = true;
        self.cursor = Cursor::default();
        if let Some(stock) = &mut self.stock {
            stock.forget();
        }
        self.backlog.clear();
        self.tail.clear();
        self.replay = None;
        self.withheld = [false; SetKind::COUNT];
        self.proven = None;
        self.whole_ms = None;
        if let Some(mut rebuild) = self.rebuild.take() {
            rebuild.abandon(core)?;
        }
        for kind in SetKind::ALL {
            if let Some(holder) = self.live[kind.index()].take() {
                core.retire(holder)?;
            }
        }
        Ok(())
    }

    /// Everything known of the engine now.
    pub fn status(&self, core: &Writer) -> Status {
        let (credit, state) = self.state();
        let count = |holder: Option<Holder>| {
            holder.and_then(|holder| core.digest(holder).ok()).map_or(0, |digest| digest.count)
        };
        Status {
            engine: self.engine(),
            slot: self.slot,
            address: self.address(),
            source: self.entry.source,
            state,
            reason: self.reason(),
            epoch: self.cursor.epoch(),
            next: self.next(),
            heard_ms: self.heard_ms,
            whole_ms: self.whole_ms,
            credit,
            in_step: self.proven.map(|proven| proven && state == EngineState::InStep),
            heartbeat: self.heartbeat.clone(),
            block_size: self.block_size(),
            blocks: self.live.map(count),
            model: self.entry.model.clone(),
            ignored: self.ignored.map(|(epoch, _)| epoch),
            native: self.stock.as_ref().map(|stock| Box::new(stock.counters())),
            tally: self.tally,
        }
    }

    /// The list's word first; else what the agent says of itself, where that is an address.
    fn address(&self) -> Option<String> {
        let told = self.heartbeat.as_ref().map(|state| state.address.as_str());
        let told = told.filter(|told| told.parse::<std::net::SocketAddr>().is_ok());
        self.entry.address.clone().or(told.map(str::to_string))
    }

    fn block_size(&self) -> u32 {
        let told = self.heartbeat.as_ref().map(|state| state.block_size);
        told.or(self.stock.as_ref().and_then(|stock| stock.block_size())).unwrap_or(0)
    }

    fn reason(&self) -> String {
        if let Some(reason) = self.stock.as_ref().and_then(|stock| stock.reason()) {
            return reason.into();
        }
        if let Some(mismatch) = &self.mismatch {
            return mismatch.clone();
        }
        if let Some(rule) = self.heartbeat.as_deref().and_then(verdict::unknown_rule) {
            return rule.into();
        }
        match (self.heard_ms, self.ignored) {
            (None, _) if self.fault.is_empty() => "nothing heard yet".into(),
            (Some(_), Some((epoch, _))) => {
                format!("another process, epoch {epoch}, speaks under this name and is ignored")
            }
            _ => self.fault.clone(),
        }
    }

    fn state(&self) -> ([bool; SetKind::COUNT], EngineState) {
        if let Some(stock) = self.stock.as_ref().filter(|_| !self.shed) {
            return stock.state();
        }
        let known = self.heartbeat_at.is_some_and(|(epoch, _)| Some(epoch) == self.cursor.epoch());
        let rule = self.heartbeat.as_deref().is_none_or(|state| verdict::unknown_rule(state).is_none());
        let trusted = known && rule && self.mismatch.is_none() && !self.shed;
        let credit = self.withheld.map(|withheld| trusted && !withheld);
        let full = self.rebuild.as_ref().is_some_and(|rebuild| rebuild.full);
        let state = if self.shed {
            EngineState::Shed
        } else if self.mismatch.is_some() {
            EngineState::Mismatched
        } else if known
            && self.proven == Some(true)
            && self.replay.is_none()
            && !full
            && self.withheld == [false; SetKind::COUNT]
        {
            EngineState::InStep
        } else {
            EngineState::Syncing
        };
        (credit, state)
    }

    fn status_state(&self, state: EngineState, now_ms: u64) -> EngineState {
        let Some(heard_ms) = self.heard_ms else { return EngineState::Silent };
        crate::answer::state_after(state, self.entry.source, now_ms.saturating_sub(heard_ms), &self.setting.leases)
    }

    /// A refusal of the core is a shortage of holders or a fault of ours: start over after a rest.
    fn settle(&mut self, core: &mut Writer, outcome: Result<(), Refused>, now_ms: u64) {
        if let Err(refused) = outcome {
            self.fault = refused.to_string();
            self.rest_until_ms = now_ms + 1000;
            if let Some(stock) = &mut self.stock {
                stock.forget();
            }
            // What can still be retired is; the first refusal is the one to tell.
            while self.live.iter().any(Option::is_some) || self.rebuild.is_some() {
                let _ = self.forget(core);
            }
        }
    }
}
