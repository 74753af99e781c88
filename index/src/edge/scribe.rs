//! The one writer: everything that streams, agents and the fleet list bring, in order, into the table. A thread of its
//! own, so that neither many lookups nor many messages take the other's turn.

use super::board::Board;
use super::bundles::Bundles;
use super::control::Job;
use super::inbox::{self, Event, Inbox, MOST_MEMBERS, Members, Parcel, Questions};
use super::metrics::Metrics;
use super::watch::Hub;
use crate::answer::{LifeStep, RequestLife, Status, Update};
use crate::fleet::{Fleet, Stream};
use crate::link::stock::Numbered;
use crate::link::{self, Effect};
use crate::reservations::{Reservations, request_number};
use crate::shared::{Holder, Writer};
use proto::event::{Life, Op, picker_request_id};
use proto::id::{EngineId, SetKind};
use proto::proof::Secret;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, watch};

mod streams;

use streams::Tasks;

/// Events taken before readers are shown what changed.
const EVENTS_A_TURN: usize = 128;
/// How often time passes for links and watchers are told.
const TICK: Duration = Duration::from_millis(20);
/// Slots of the table that are swept or recounted in one step: some tens of microseconds.
const STEP_SLOTS: usize = 8192;
/// Lives that wait for watchers: told early when there are more.
const MOST_LIVES: usize = 1024;

/// What the writer needs.
pub struct Setting {
    /// The table.
    pub core: Writer,
    /// What readers see of the fleet.
    pub board: Arc<Board>,
    /// Placements: ended by what engines report.
    pub book: Arc<Mutex<Reservations>>,
    /// Watchers.
    pub hub: Hub,
    /// Bundles to fetch.
    pub bundles: Arc<Bundles>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// The deployment's seed.
    pub seed: u64,
    /// Names this index to agents.
    pub reader_id: u64,
    /// What is proved to agents that want it.
    pub secret: Option<Secret>,
    /// Agents may dial in.
    pub agents_dial: bool,
    /// Budget of the table and its sets.
    pub memory_bytes: u64,
    /// True when all is to end.
    pub stopped: watch::Receiver<bool>,
}

/// Starts the writer's thread.
///
/// # Errors
/// When there is no thread to be had.
pub fn start(setting: Setting) -> std::io::Result<Questions> {
    let (inbox, receiver) = inbox::open();
    let sockets = tokio::runtime::Handle::current();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    let fleet =
        Fleet::new(link::Setting { seed: setting.seed, leases: setting.board.leases, reader: setting.reader_id });
    let scribe = Scribe {
        setting,
        fleet,
        sockets,
        inbox: inbox.clone(),
        streams: BTreeMap::new(),
        touched: BTreeSet::new(),
        changed: BTreeSet::new(),
        gone: Vec::new(),
        lives: Vec::new(),
        audit: None,
        ticks: 0,
    };
    std::thread::Builder::new().name("index-writer".into()).spawn(move || runtime.block_on(scribe.run(receiver)))?;
    Ok(Questions(inbox))
}

struct Scribe {
    setting: Setting,
    fleet: Fleet,
    /// Where sockets are served.
    sockets: tokio::runtime::Handle,
    inbox: Inbox,
    streams: BTreeMap<Stream, Tasks>,
    /// Streams that something was received for since readers were last shown.
    touched: BTreeSet<Stream>,
    /// Streams that changed since watchers were last told.
    changed: BTreeSet<Stream>,
    gone: Vec<EngineId>,
    lives: Vec<RequestLife>,
    /// The holder whose members are being recounted in the table.
    audit: Option<(Stream, SetKind, Holder)>,
    ticks: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Scribe {
    async fn run(mut self, mut receiver: mpsc::Receiver<Parcel>) {
        let mut stopped = self.setting.stopped.clone();
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut sweeping = false;
        loop {
            tokio::select! {
                // Ticks first: they are rare, and leases must not wait for a busy stream.
                biased;
                // An error says that every handle is gone: stop as well.
                _ = stopped.wait_for(|stopped| *stopped) => break,
                _ = tick.tick() => self.tick(),
                parcel = receiver.recv() => {
                    let Some(parcel) = parcel else { break };
                    self.event(parcel.event);
                    for _ in 1..EVENTS_A_TURN {
                        let Ok(parcel) = receiver.try_recv() else { break };
                        self.event(parcel.event);
                    }
                }
                // Nothing waits: clear away what retired holders left.
                _ = tokio::time::sleep(Duration::from_millis(1)), if sweeping => {}
            }
            sweeping = self.setting.core.sweep(STEP_SLOTS);
            self.show();
        }
        self.streams.clear();
    }

    fn event(&mut self, event: Event) {
        let now_ms = self.setting.board.clock.now_ms();
        let mut out = Vec::new();
        let core = &mut self.setting.core;
        let stream = match event {
            Event::Message { stream, seq, batch, bytes, loopback } => {
                let Some(link) = self.fleet.link(stream) else { return };
                let step_ms = batch.step_ms;
                let changes = loopback && batch.ops.iter().any(|op| matches!(op, Op::Store(_) | Op::Remove(_)));
                link.receive(core, seq, batch, bytes, now_ms, &mut out);
                if changes && link.next() > seq {
                    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                    let taken = since.saturating_sub(Duration::from_millis(step_ms));
                    self.setting.metrics.step_to_answerable(taken);
                }
                stream
            }
            Event::Events { stream, seq, batch, bytes } => {
                let Some(link) = self.fleet.link(stream) else { return };
                link.events(core, Numbered { seq, batch, bytes }, now_ms, &mut out);
                stream
            }
            Event::Replayed { stream, id, seq, batch, bytes } => {
                let Some(link) = self.fleet.link(stream) else { return };
                link.replayed_events(core, id, Numbered { seq, batch, bytes }, now_ms, &mut out);
                stream
            }
            Event::ReplayOver { stream, id, whole, reason } => {
                let Some(link) = self.fleet.link(stream) else { return };
                link.replay_over(core, id, whole, &reason, now_ms, &mut out);
                stream
            }
            Event::Pulse { stream, outcome } => {
                let Some(link) = self.fleet.link(stream) else { return };
                match outcome {
                    Ok(pulse) => link.pulse(core, pulse, now_ms, &mut out),
                    Err(reason) => link.no_pulse(reason),
                }
                stream
            }
            Event::Connected { stream } => {
                let Some(link) = self.fleet.link(stream) else { return };
                link.connected(core, now_ms, &mut out);
                stream
            }
            Event::Bad { stream, reason, version } => {
                let Some(link) = self.fleet.link(stream) else { return };
                link.bad(reason, version, now_ms);
                stream
            }
            Event::Away { stream, reason } => {
                let Some(link) = self.fleet.link(stream) else { return };
                link.away(reason);
                stream
            }
            Event::Reply { stream, id, reply } => {
                let Some(link) = self.fleet.link(stream) else { return };
                link.reply(core, id, reply, now_ms, &mut out);
                stream
            }
            Event::Failed { stream, id, reason } => {
                let Some(link) = self.fleet.link(stream) else { return };
                link.failed(core, id, &reason, now_ms, &mut out);
                stream
            }
            Event::Arrived(arrival) => return self.arrived(*arrival, now_ms),
            Event::Left { stream, connection, reason } => {
                self.fleet.left(stream, connection, reason);
                stream
            }
            Event::Fleet(entries, seen) => {
                self.renew(entries, now_ms);
                if let Some(seen) = seen {
                    // Who asked may have left.
                    let _ = seen.send(());
                }
                return;
            }
            Event::Members { engine, kind, answer } => {
                let found = self.fleet.links().find(|(_, link)| link.engine().to_string() == engine);
                let members = found.map(|(_, link)| {
                    let mut fingerprints =
                        link.live(kind).and_then(|holder| core.members(holder).ok()).unwrap_or_default();
                    fingerprints.truncate(MOST_MEMBERS);
                    Members { next: link.next(), fingerprints }
                });
                // Who asked may have left.
                let _ = answer.send(members);
                return;
            }
        };
        self.touched.insert(stream);
        self.carry_out(stream, out);
    }

    fn carry_out(&mut self, stream: Stream, effects: Vec<Effect>) {
        let Some(link) = self.fleet.link(stream) else { return };
        let (slot, engine) = (link.slot(), link.engine());
        for effect in effects {
            match effect {
                Effect::Ask { id, request } => {
                    // A full queue loses the ask; the link's deadline repeats it.
                    if let Some(tasks) = self.streams.get(&stream) {
                        let _ = tasks.jobs.try_send(Job::Ask { id, request });
                    }
                }
                Effect::Ack(request) => {
                    if let Some(tasks) = self.streams.get(&stream) {
                        let _ = tasks.jobs.try_send(Job::Ack(request));
                    }
                }
                Effect::Events { id, from } => {
                    if let Some(tasks) = self.streams.get(&stream) {
                        let _ = tasks.jobs.try_send(Job::Events { id, from });
                    }
                }
                Effect::EpochEnded | Effect::LivesLost => lock(&self.setting.book).epoch_ended(slot),
                Effect::Life(life) => self.life(slot, &engine, life),
            }
        }
    }

    fn life(&mut self, slot: u32, engine: &EngineId, life: Life) {
        let Some(request_id) = picker_request_id(life.id()).map(str::to_string) else { return };
        let Some(number) = request_number(&request_id) else { return };
        let step = match life {
            Life::Arrived { .. } => {
                lock(&self.setting.book).arrived(slot, number);
                LifeStep::Arrived
            }
            Life::Started { prompt_tokens, cached_tokens, predicted_tokens, .. } => {
                // Whoever started has arrived, should that message be lost.
                lock(&self.setting.book).arrived(slot, number);
                LifeStep::Started { prompt_tokens, cached_tokens, predicted_tokens }
            }
            Life::Finished { reason, .. } => {
                lock(&self.setting.book).finished(slot, number);
                LifeStep::Finished(reason)
            }
        };
        self.lives.push(RequestLife { request_id, engine: engine.clone(), step });
        if self.lives.len() >= MOST_LIVES {
            self.tell();
        }
    }

    /// Puts the list of engines up anew.
    fn list(&mut self) {
        let Setting { core, board, .. } = &self.setting;
        board.replace(self.fleet.links().map(|(_, link)| link.status(core)));
        for seat in board.seats().iter() {
            if let Some((stream, _)) = self.fleet.links().find(|(_, link)| link.slot() == seat.slot)
                && let Some(tasks) = self.streams.get_mut(&stream)
            {
                tasks.seat = Some(seat.clone());
            }
        }
        self.changed.extend(self.streams.keys());
    }

    /// Shows readers what changed.
    fn show(&mut self) {
        for stream in std::mem::take(&mut self.touched) {
            let Some(link) = self.fleet.link(stream) else { continue };
            if !link.take_dirty() {
                continue;
            }
            if let Some(seat) = self.streams.get(&stream).and_then(|tasks| tasks.seat.as_ref()) {
                let status = link.status(&self.setting.core);
                tell_apart(&seat.status(), &status);
                seat.put(Arc::new(status));
                self.changed.insert(stream);
            }
        }
    }

    /// Tells watchers what changed.
    fn tell(&mut self) {
        if self.changed.is_empty() && self.gone.is_empty() && self.lives.is_empty() {
            return;
        }
        let seats =
            std::mem::take(&mut self.changed).into_iter().filter_map(|stream| self.streams.get(&stream)?.seat.as_ref());
        let engines = seats.map(|seat| seat.status()).collect();
        let (gone, lives) = (std::mem::take(&mut self.gone), std::mem::take(&mut self.lives));
        self.setting.hub.tell(Update { engines, gone, lives, ..Update::default() });
    }

    fn tick(&mut self) {
        self.ticks += 1;
        let now_ms = self.setting.board.clock.now_ms();
        let mut effects = Vec::new();
        self.fleet.tick(&mut self.setting.core, now_ms, |stream, out| effects.push((stream, out)));
        for (stream, out) in effects {
            self.carry_out(stream, out);
        }
        self.touched.extend(self.streams.keys());
        self.show();
        self.tell();
        self.recount(now_ms);
        if self.ticks.is_multiple_of(5) {
            self.want_bundles();
            self.setting.metrics.set_core(self.setting.core.stats());
        }
        if self.ticks.is_multiple_of(50) {
            lock(&self.setting.book).sweep(now_ms);
            let changes = self.fleet.depart(&mut self.setting.core, now_ms);
            if !changes.closed.is_empty() {
                self.take_over(changes);
            }
            if let Some(engine) = self.fleet.fit(&mut self.setting.core, self.setting.memory_bytes, now_ms) {
                tracing::error!(
                    engine,
                    "over the byte budget: everything held of this engine is dropped; raise memory_bytes"
                );
                self.setting.metrics.shed();
            }
            let fleet = &self.fleet;
            self.setting.bundles.keep(|digest| {
                fleet.links().any(|(_, link)| link.heartbeat().is_some_and(|state| state.bundle == digest))
            });
        }
    }

    fn want_bundles(&mut self) {
        for (stream, link) in self.fleet.links() {
            let Some(digest) = link.heartbeat().map(|state| &state.bundle).filter(|digest| !digest.is_empty()) else {
                continue;
            };
            if self.setting.bundles.claim(digest, stream) {
                let asked = self.streams.get(&stream).map(|tasks| tasks.jobs.try_send(Job::Bundle(digest.clone())));
                if !matches!(asked, Some(Ok(()))) {
                    self.setting.bundles.unclaim(stream);
                }
            }
        }
    }

    /// Walks on with recounting one holder after another in the table itself.
    fn recount(&mut self, now_ms: u64) {
        let core = &mut self.setting.core;
        let (stream, kind, holder) = match self.audit {
            Some(audit) => audit,
            None => return self.audit_next(None),
        };
        match core.recount(holder, STEP_SLOTS) {
            Ok(None) => return,
            Ok(Some(counted)) => {
                self.setting.metrics.recounted();
                if core.digest(holder).is_ok_and(|kept| kept != counted)
                    && let Some(link) = self.fleet.link(stream).filter(|link| link.live(kind) == Some(holder))
                {
                    tracing::error!(engine = %link.engine(), kind = kind.name(), "the table and its digest differ: a fault of the index; the set is fetched anew");
                    self.setting.metrics.miscounted();
                    let mut out = Vec::new();
                    link.miscounted(core, kind, now_ms, &mut out);
                    self.carry_out(stream, out);
                }
            }
            // Retired meanwhile.
            Err(_) => {}
        }
        self.audit_next(Some((stream, kind)));
    }

    fn audit_next(&mut self, after: Option<(Stream, SetKind)>) {
        let all = || {
            self.fleet.links().flat_map(|(stream, link)| {
                SetKind::ALL.into_iter().filter_map(move |kind| Some((stream, kind, link.live(kind)?)))
            })
        };
        let next = all().find(|(stream, kind, _)| after.is_some_and(|after| (*stream, *kind) > after));
        self.audit = next.or_else(|| all().next());
    }
}

/// Logs a change of state, once.
fn tell_apart(before: &Status, after: &Status) {
    if (before.state, &before.reason, before.epoch) != (after.state, &after.reason, after.epoch) {
        tracing::info!(
            engine = %after.engine, from = before.state.name(), to = after.state.name(), reason = after.reason,
            epoch = after.epoch.map(|epoch| epoch.to_string()), "engine"
        );
    }
}
