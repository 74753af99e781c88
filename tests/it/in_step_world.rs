//! A network of engines and one index without sockets or clocks, for the property test: everything is an event at a
//! time, and what is lost, doubled, late or damaged follows from the seed.

use crate::in_step_sender::{KINDS, MODEL, Sender};
use harness::seeded::Seeded;
use index::answer::{EngineState, Leases, Status};
use index::link::{Effect, Link as Stream, Setting};
use index::shared::{Limits, Reader, Writer, open};
use proto::block::Fingerprint;
use proto::control::{Reply, Request, decode, encode};
use proto::event::{Batch, Op};
use proto::fleet::Entry;
use proto::id::{Epoch, SetKind};
use proto::residency::Link;
use std::collections::{BTreeMap, BTreeSet};

/// The deployment's seed.
const SEED: u64 = 77;
/// Engines; the last one's agent has another seed.
pub const ENGINES: usize = 3;
/// The one whose agent has another seed.
pub const STRANGER: usize = ENGINES - 1;

/// How bad the network is, in percent of messages.
#[derive(Debug, Clone, Copy, Default)]
pub struct Weather {
    pub lost: u64,
    pub doubled: u64,
    pub late: u64,
    /// One operation is missing from the message: only digests can tell.
    pub damaged: u64,
    /// Answers on the control socket that never come.
    pub unanswered: u64,
}

enum Arrival {
    Message { seq: u64, payload: Vec<u8> },
    Asked { id: u64, request: Vec<u8> },
    Answered { id: u64, reply: Vec<u8> },
    Failed { id: u64 },
}

/// Everything.
pub struct World {
    pub seed: u64,
    pub dice: Seeded,
    pub now_ms: u64,
    pub weather: Weather,
    pub core: Writer,
    pub reader: Reader,
    pub streams: Vec<Stream>,
    pub senders: Vec<Sender>,
    /// Nothing passes between an engine and the index until then.
    pub cut_off_until: [u64; ENGINES],
    /// A damaged message may have been applied since the sets were last seen to agree.
    pub suspect: [bool; ENGINES],
    parents: BTreeMap<Fingerprint, Link>,
    names: Vec<Fingerprint>,
    arriving: BTreeMap<(u64, u64), (usize, Arrival)>,
    arrivals: u64,
    starts: u64,
    /// Every state that every engine was seen in, and what was counted: the trace of the run.
    pub trace: Vec<String>,
    noted: [String; ENGINES],
    pub damaged: u64,
}

impl World {
    /// A calm world of empty engines and an index that has heard nothing.
    pub fn new(seed: u64) -> Self {
        let mut dice = Seeded::new(seed);
        let (core, reader) = open(Limits::default());
        let blocks = 30 + dice.below(60) as u64;
        let parents: BTreeMap<u64, Link> = (0..blocks)
            .map(|i| {
                let root = i < 2 || dice.percent(5);
                (1000 + i, if root { Link::Root(1 + i % 2) } else { Link::Block(1000 + dice.below(i as usize) as u64) })
            })
            .collect();
        let setting = Setting { seed: SEED, leases: Leases::default(), reader: 1 };
        let name = |at: usize| format!("engine-{at}");
        let entry = |at| -> Entry { serde_json::from_value(serde_json::json!({"name": name(at)})).expect("an entry") };
        let senders = (0..ENGINES).map(|at| {
            let seed = if at == STRANGER { SEED + 1 } else { SEED };
            Sender::new(&name(at), seed, Epoch { start_ms: 1 + at as u64, random: seed })
        });
        Self {
            seed,
            dice,
            now_ms: 10,
            weather: Weather::default(),
            core,
            reader,
            streams: (0..ENGINES).map(|at| Stream::new(setting, entry(at), at as u32)).collect(),
            senders: senders.collect(),
            cut_off_until: [0; ENGINES],
            suspect: [false; ENGINES],
            names: parents.keys().copied().collect(),
            parents,
            arriving: BTreeMap::new(),
            arrivals: 0,
            starts: 100,
            trace: Vec::new(),
            noted: Default::default(),
            damaged: 0,
        }
    }

    /// Lets one engine work for a step, and tell of it.
    pub fn work(&mut self, engine: usize) {
        for _ in 0..self.dice.below(6) {
            let fp = *self.dice.pick(&self.names);
            let kind = *self.dice.pick(&KINDS);
            let comes = self.dice.percent(58);
            self.senders[engine].copy(kind, fp, self.parents[&fp], comes);
        }
        if self.dice.percent(1) {
            self.senders[engine].clear();
        }
        self.tell(engine, false);
    }

    /// One engine's process ends and another one starts under its name.
    pub fn restart(&mut self, engine: usize) {
        self.starts += 1;
        let epoch = Epoch { start_ms: self.starts, random: self.dice.word() };
        self.senders[engine].restart(epoch);
        // Of half of them nobody hears seq 0, so that a snapshot is needed.
        if self.dice.percent(50) {
            self.senders[engine].step(self.now_ms, true);
        }
    }

    /// The index forgets everything and starts anew.
    pub fn restart_index(&mut self) {
        (self.core, self.reader) = open(Limits::default());
        let setting = Setting { seed: SEED, leases: Leases::default(), reader: 2 };
        self.streams = self
            .streams
            .iter()
            .enumerate()
            .map(|(at, old)| Stream::new(setting, old.entry().clone(), at as u32))
            .collect();
        // Answers on their way are of connections that are gone.
        self.arriving.retain(|_, (_, arrival)| matches!(arrival, Arrival::Message { .. }));
        self.suspect = [false; ENGINES];
    }

    fn arrive(&mut self, engine: usize, arrival: Arrival, after_ms: u64) {
        self.arrivals += 1;
        self.arriving.insert((self.now_ms + after_ms, self.arrivals), (engine, arrival));
    }

    fn tell(&mut self, engine: usize, beat: bool) {
        let Some((seq, payload)) = self.senders[engine].step(self.now_ms, beat) else { return };
        let copies = 1 + u64::from(self.dice.percent(self.weather.doubled));
        for _ in 0..copies {
            if self.dice.percent(self.weather.lost) {
                continue;
            }
            let after = if self.dice.percent(self.weather.late) { self.dice.below(400) as u64 } else { 1 };
            let payload =
                if self.dice.percent(self.weather.damaged) { self.damage(engine, &payload) } else { payload.clone() };
            self.arrive(engine, Arrival::Message { seq, payload }, after);
        }
    }

    fn damage(&mut self, engine: usize, payload: &[u8]) -> Vec<u8> {
        let mut batch = Batch::decode(payload).expect("our own");
        let changes: Vec<usize> =
            (0..batch.ops.len()).filter(|at| matches!(batch.ops[*at], Op::Store(_) | Op::Remove(_))).collect();
        if !changes.is_empty() {
            batch.ops.remove(*self.dice.pick(&changes));
            self.suspect[engine] = true;
            self.damaged += 1;
        }
        batch.encode().expect("a batch encodes")
    }

    /// Lets so many milliseconds pass.
    pub fn pass(&mut self, ms: u64) {
        let end = self.now_ms + ms;
        while self.now_ms < end {
            self.now_ms += 1;
            while let Some(entry) = self.arriving.first_entry().filter(|entry| entry.key().0 <= self.now_ms) {
                let (engine, arrival) = entry.remove();
                self.arrived(engine, arrival);
            }
            for engine in 0..ENGINES {
                if self.now_ms % 100 == engine as u64 * 7 {
                    self.tell(engine, true);
                }
                if self.now_ms.is_multiple_of(20) {
                    let mut out = Vec::new();
                    self.streams[engine].tick(&mut self.core, self.now_ms, &mut out);
                    self.carry_out(engine, out);
                    self.core.sweep(64);
                    self.note(engine);
                }
            }
        }
    }

    fn arrived(&mut self, engine: usize, arrival: Arrival) {
        if self.now_ms < self.cut_off_until[engine] {
            if let Arrival::Asked { id, .. } | Arrival::Answered { id, .. } = arrival {
                self.arrive(engine, Arrival::Failed { id }, 2000);
            } else if let Arrival::Failed { .. } = arrival {
                self.arrive(engine, arrival, 100);
            }
            return;
        }
        let mut out = Vec::new();
        let (stream, core) = (&mut self.streams[engine], &mut self.core);
        match arrival {
            Arrival::Message { seq, payload } => {
                let batch = Batch::decode(&payload).expect("a batch decodes");
                stream.receive(core, seq, batch, payload.len(), self.now_ms, &mut out);
            }
            Arrival::Answered { id, reply } => {
                let reply: Reply = decode(&reply).expect("a reply decodes");
                stream.reply(core, id, reply, self.now_ms, &mut out);
            }
            Arrival::Failed { id } => stream.failed(core, id, "lost", self.now_ms, &mut out),
            Arrival::Asked { id, request } => {
                let request: Request = decode(&request).expect("a request decodes");
                // Cuts are made between steps: what the engine did is told before.
                if self.senders[engine].owes() {
                    self.tell(engine, false);
                }
                let reply = encode(&self.senders[engine].answer(&request, &mut self.dice)).expect("a reply encodes");
                let late = self.dice.below(60) as u64;
                match self.dice.percent(self.weather.unanswered) {
                    true => self.arrive(engine, Arrival::Failed { id }, 2000),
                    false => self.arrive(engine, Arrival::Answered { id, reply }, 1 + late),
                }
            }
        }
        self.carry_out(engine, out);
        self.note(engine);
    }

    fn carry_out(&mut self, engine: usize, effects: Vec<Effect>) {
        for effect in effects {
            if let Effect::Ask { id, request } = effect {
                let request = encode(&request).expect("a request encodes");
                self.arrive(engine, Arrival::Asked { id, request }, 1);
            }
        }
    }

    fn note(&mut self, engine: usize) {
        let status = self.streams[engine].status(&self.core);
        let state = status.state_at(self.now_ms, &Leases::default());
        let line = format!("{engine} {} {:?} {:?}", state.name(), status.blocks, status.tally.resyncs);
        if self.noted[engine] != line {
            self.noted[engine] = line.clone();
            self.trace.push(line);
        }
        self.check(engine, &status, state);
    }

    /// What must hold at every moment: nothing is credited that the engine did not have when it sent what was last
    /// applied, and nothing at all of a stranger or of one that is silent.
    fn check(&self, engine: usize, status: &Status, state: EngineState) {
        let at = || format!("seed {} at {} ms, engine {engine}, {state:?}", self.seed, self.now_ms);
        for kind in KINDS {
            if !status.credited(kind, self.now_ms, &Leases::default()) {
                continue;
            }
            assert_ne!(engine, STRANGER, "{}: a stranger is credited", at());
            assert!(
                status.age_ms(self.now_ms) <= 1000,
                "{}: credited though silent for {} ms",
                at(),
                status.age_ms(self.now_ms)
            );
            let whole = status.whole_ms.map(|at| self.now_ms - at);
            assert!(whole.is_some_and(|ms| ms <= 1000), "{}: credited though incomplete for {whole:?} ms", at());
            let sender = &self.senders[engine];
            // Until its digest told, a damaged set passes for good; when more is damaged, for good again.
            let unseen = self.suspect[engine] && !(self.damaged == 1 && status.tally.digest_failures > 0);
            if unseen || status.epoch != Some(sender.epoch()) {
                continue;
            }
            let held = self.streams[engine]
                .live(kind)
                .map(|holder| self.core.digest(holder).expect("live"))
                .unwrap_or_default();
            let history = &sender.history;
            let from = (status.next as usize).saturating_sub(1);
            let known = (status.next == 0 && held.count == 0)
                || history[from.min(history.len())..].iter().any(|sets| sets[kind.index()] == held);
            assert!(known, "{}: {} holds what the engine never had from message {from} on", at(), kind.name());
        }
    }

    /// The index's live set.
    pub fn members(&self, engine: usize, kind: SetKind) -> BTreeSet<Fingerprint> {
        let holder = self.streams[engine].live(kind);
        holder.map(|holder| self.core.members(holder).expect("live").into_iter().collect()).unwrap_or_default()
    }

    /// The network is good again and nobody works: everything must agree, for every prompt.
    pub fn quiet(&mut self) {
        self.weather = Weather::default();
        self.cut_off_until = [0; ENGINES];
        // The longest silence of the control socket (2 s), a pause, what was late, a snapshot and a heartbeat.
        self.pass(4500);
        for engine in 0..ENGINES {
            let status = self.streams[engine].status(&self.core);
            let state = status.state_at(self.now_ms, &Leases::default());
            let want = if engine == STRANGER { EngineState::Mismatched } else { EngineState::InStep };
            assert_eq!(state, want, "seed {} at {} ms, engine {engine}: {}", self.seed, self.now_ms, status.reason);
            assert_eq!(status.models(), [MODEL], "seed {}", self.seed);
            for kind in KINDS {
                let truth = self.senders[engine].truth(kind);
                assert_eq!(
                    self.members(engine, kind),
                    truth,
                    "seed {} at {} ms, engine {engine}, {}",
                    self.seed,
                    self.now_ms,
                    kind.name()
                );
            }
            self.suspect[engine] = false;
        }
        self.ask_all();
    }

    fn ask_all(&mut self) {
        let truth: Vec<[BTreeSet<u64>; 2]> =
            self.senders.iter().map(|sender| KINDS.map(|kind| sender.truth(kind))).collect();
        let mut depths = Vec::new();
        for name in &self.names {
            let mut prompt = vec![*name];
            while let Link::Block(parent) = self.parents[prompt.last().expect("not empty")] {
                prompt.push(parent);
            }
            prompt.reverse();
            self.reader.find(&prompt).depths(&mut depths);
            for (engine, truth) in truth.iter().enumerate() {
                let want =
                    KINDS.map(|kind| prompt.iter().take_while(|fp| truth[kind.index()].contains(fp)).count() as u32);
                let got = depths.get(engine).copied().unwrap_or_default();
                assert_eq!(got, want, "seed {}, engine {engine}, the prompt that ends at {name}", self.seed);
            }
        }
    }
}
