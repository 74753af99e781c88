//! The concurrent core: one [`Writer`], any number of [`Reader`]s, and what they share.
//!
//! The table says, for each fingerprint, which *holders* have it. A holder is one generation of one set of one
//! engine: [`Writer::open`] gives a hidden one, [`Writer::publish`] makes it that engine's live set of its kind and
//! retires the one before it in the same swap, so the arrival of a snapshot, a clear, a purge and a restart are each
//! one step to readers. What a retired holder leaves in the table is swept away by [`Writer::sweep`] in bounded steps.
//!
//! Promise of [`Reader::find`] beside a busy writer: a holder answered with depth `d` held block `d - 1` at some
//! instant of the lookup, and held block 0, and was live when the lookup began.

pub(crate) mod pins;

use crate::find::{Bits, Levels, View};
use crate::sets::{Record, Sets};
use crate::table::{Directory, Found, Table};
use pins::{Limbo, Pin, Pinned, Pins, Published, Seat, Slab};
use proto::block::Fingerprint;
use proto::digest::Digest;
use proto::id::SetKind;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

/// What bounds a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Engine slots: numbers below this are accepted by [`Writer::open`].
    pub engines: u32,
    /// Holders that exist at once: live, hidden and not yet swept.
    pub holders: u32,
    /// Secret that spreads fingerprints over the table, drawn at start, so that who chooses fingerprints cannot
    /// choose where they fall.
    pub spread: u64,
}

impl Default for Limits {
    /// 4,096 engine slots; for each three kinds, a live, an arriving and a leaving generation.
    fn default() -> Self {
        Self { engines: 4096, holders: 4096 * 3 * 3, spread: 0 }
    }
}

/// A handle on one holder: one generation of one set of one engine. Handles of swept holders never become valid again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Holder {
    number: u32,
    generation: u32,
}

/// Whose set: what readers see of a holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Held {
    /// The engine slot given to [`Writer::open`].
    pub engine: u32,
    /// The kind given to [`Writer::open`].
    pub kind: SetKind,
}

/// What an operation did, in fingerprints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Changed {
    /// Membership bits that really changed.
    pub changed: u64,
    /// Stores of members, removals of absent ones, and the reserved fingerprint 0: nothing happened.
    pub unchanged: u64,
}

/// Why an operation was refused. Nothing has changed then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Every holder number is in use.
    #[error("all {limit} holders are in use; sweep retired ones, retire engines, or raise the limit")]
    NoHolderLeft {
        /// [`Limits::holders`].
        limit: u32,
    },
    /// The engine slot is beyond the limit.
    #[error("engine slot {engine} is beyond the limit of {limit}")]
    NoSuchEngine {
        /// What was asked for.
        engine: u32,
        /// [`Limits::engines`].
        limit: u32,
    },
    /// The holder was retired.
    #[error("holder {number} of generation {generation} was retired")]
    Retired {
        /// The holder's number.
        number: u32,
        /// The handle's generation.
        generation: u32,
    },
}

/// Counts and sizes of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Slots of the table.
    pub slots: u64,
    /// Slots with a fingerprint that some holder has.
    pub used: u64,
    /// Distinct holder sets.
    pub sets: u64,
    /// Remembered (set, holder) transitions, a fixed number of places.
    pub transitions: u64,
    /// Holders open: live and hidden.
    pub holders: u64,
    /// Holders retired and not yet swept or still visible to a reader.
    pub retired: u64,
    /// Bytes of the table.
    pub table_bytes: u64,
    /// Bytes of the sets.
    pub sets_bytes: u64,
    /// Bytes replaced but kept because a reader may still look at them.
    pub limbo_bytes: u64,
}

impl Stats {
    /// All bytes of the core.
    pub fn bytes(&self) -> u64 {
        self.table_bytes + self.sets_bytes + self.limbo_bytes
    }
}

/// What readers know of holders. Replaced as a whole whenever one is published or retired.
struct Map {
    /// Live holders of kind gpu and any: those that are bisected.
    closed: Box<[u64]>,
    /// All live holders.
    live: Box<[u64]>,
    /// By holder number; meaningless where not live.
    held: Box<[Held]>,
    /// By engine slot: the number of the live *ends* holder, + 1; 0 for none.
    ends: Box<[u32]>,
    /// Highest live engine slot, + 1.
    engines: usize,
}

/// What writer and readers share.
struct Core {
    pins: Arc<Pins>,
    map: Published<Map>,
    directory: Arc<Published<Directory>>,
    sets: Arc<Slab<Record>>,
}

/// A core with nobody in it: its writer and a first reader.
pub fn open(limits: Limits) -> (Writer, Reader) {
    let pins = Pins::new();
    let limbo = Limbo::new(&pins);
    let (table, sets) = (Table::new(limits.spread), Sets::new(&limbo));
    let core = Arc::new(Core {
        map: Published::new(Arc::new(Map::of(&[]))),
        directory: table.directory().clone(),
        sets: sets.slab().clone(),
        pins,
    });
    // Numbers below 2^30 leave room for what sets make of them.
    let limits = Limits { holders: limits.holders.min(1 << 30), ..limits };
    let reader = Reader::new(&core);
    let writer = Writer {
        core,
        limits,
        limbo,
        table,
        sets,
        holders: vec![],
        free: BinaryHeap::new(),
        leaving: vec![],
        pass: None,
        swept: VecDeque::new(),
        recount: None,
    };
    (writer, reader)
}

/// What the writer knows of a holder number.
struct Entry {
    generation: u32,
    held: Held,
    state: State,
    digest: Digest,
    /// When it was retired.
    left: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Hidden,
    Live,
    Gone,
}

/// One walk of the sweep.
struct Pass {
    mask: Vec<u64>,
    numbers: Vec<u32>,
    /// Membership bits not yet met.
    bits: u64,
    cursor: u64,
}

/// One walk of the recount: all before the cursor is in the digest.
struct Recount {
    holder: Holder,
    cursor: u64,
    digest: Digest,
}

/// A run of slots that go from one set to another, counted at its end.
#[derive(Default)]
struct Run {
    from: u32,
    to: u32,
    slots: u32,
    begun: bool,
}

impl Run {
    /// Where slots with set `from` go; `to` says it at the beginning of a run.
    #[inline]
    fn step(&mut self, from: u32, sets: &mut Sets, limbo: &mut Limbo, to: impl FnOnce(&mut Sets, &Limbo) -> u32) -> u32 {
        if !self.begun || self.from != from {
            self.end(sets, limbo);
            *self = Run { from, to: to(sets, limbo), slots: 0, begun: true };
        }
        self.slots += 1;
        self.to
    }

    fn end(&mut self, sets: &mut Sets, limbo: &mut Limbo) {
        if self.slots > 0 && self.from != self.to {
            sets.recount(self.from, self.to, self.slots, limbo);
        }
        *self = Run::default();
    }
}

fn bit(mask: &mut [u64], number: usize) {
    if let Some(word) = mask.get_mut(number / 64) {
        *word |= 1 << (number % 64);
    }
}

impl Map {
    fn of(holders: &[Entry]) -> Map {
        let live = || holders.iter().enumerate().filter(|(_, entry)| entry.state == State::Live);
        let count = live().next_back().map_or(0, |(number, _)| number + 1);
        let engines = live().map(|(_, entry)| entry.held.engine as usize + 1).max().unwrap_or(0);
        let words = vec![0; count.div_ceil(64)];
        let mut map = Map {
            closed: words.clone().into(),
            live: words.into(),
            held: holders[..count].iter().map(|entry| entry.held).collect(),
            ends: vec![0; engines].into(),
            engines,
        };
        for (number, entry) in live() {
            bit(&mut map.live, number);
            match entry.held.kind {
                SetKind::Gpu | SetKind::Any => bit(&mut map.closed, number),
                SetKind::Ends => map.ends[entry.held.engine as usize] = number as u32 + 1,
            }
        }
        map
    }

    fn bytes(&self) -> usize {
        size_of_val::<[Held]>(&self.held) + (self.closed.len() + self.live.len()) * 8 + self.ends.len() * 4
    }
}

/// The only hand that changes the table. Not `Clone`; it may move between threads. It remembers what it has published,
/// so a handle, a count or a digest never costs a look at the table.
pub struct Writer {
    core: Arc<Core>,
    limits: Limits,
    limbo: Limbo,
    table: Table,
    sets: Sets,
    /// By number. As long as the most holders that ever existed at once.
    holders: Vec<Entry>,
    /// Numbers to use again, lowest first, so that sets stay short.
    free: BinaryHeap<Reverse<u32>>,
    /// Retired, for the next pass of the sweep.
    leaving: Vec<u32>,
    pass: Option<Pass>,
    /// Swept, waiting for readers.
    swept: VecDeque<u32>,
    recount: Option<Recount>,
}

/// Fingerprints ahead of which a line is fetched: about a memory access in time.
const AHEAD: usize = 8;

impl Writer {
    fn entry(&self, holder: Holder) -> Result<&Entry, Refused> {
        let entry = self.holders.get(holder.number as usize);
        let is = |entry: &&Entry| entry.generation == holder.generation && entry.state != State::Gone;
        entry.filter(is).ok_or(Refused::Retired { number: holder.number, generation: holder.generation })
    }

    /// Ends an operation: readers that left are noticed, and what they held is freed.
    fn settle(&mut self) {
        self.limbo.advance();
        self.sets.reclaim(&self.limbo);
        while let Some(number) = self.swept.pop_front() {
            if !self.limbo.passed(self.holders[number as usize].left) {
                self.swept.push_front(number);
                break;
            }
            self.free.push(Reverse(number));
        }
    }

    fn show(&mut self) {
        let map = Arc::new(Map::of(&self.holders));
        let bytes = map.bytes();
        self.core.map.replace(map, bytes, &mut self.limbo);
    }

    /// A new, empty, hidden holder for an engine slot and a kind.
    pub fn open(&mut self, engine: u32, kind: SetKind) -> Result<Holder, Refused> {
        if engine >= self.limits.engines {
            return Err(Refused::NoSuchEngine { engine, limit: self.limits.engines });
        }
        self.settle();
        let held = Held { engine, kind };
        let new = Entry { generation: 0, held, state: State::Hidden, digest: Digest::default(), left: 0 };
        if let Some(Reverse(number)) = self.free.pop() {
            let entry = &mut self.holders[number as usize];
            let generation = entry.generation.wrapping_add(1);
            *entry = Entry { generation, ..new };
            return Ok(Holder { number, generation });
        }
        let number = self.holders.len() as u32;
        if number >= self.limits.holders {
            return Err(Refused::NoHolderLeft { limit: self.limits.holders });
        }
        self.holders.push(new);
        Ok(Holder { number, generation: 0 })
    }

    /// Makes `holder` the live one of its engine and kind. The one before it is retired in the same swap and returned.
    /// Publishing a live holder changes nothing and returns `None`.
    pub fn publish(&mut self, holder: Holder) -> Result<Option<Holder>, Refused> {
        let held = self.entry(holder)?.held;
        let old = self.live(held.engine, held.kind);
        if old == Some(holder) {
            return Ok(None);
        }
        self.holders[holder.number as usize].state = State::Live;
        if let Some(old) = old {
            self.leave(old);
        }
        self.show();
        self.settle();
        Ok(old)
    }

    /// Takes `holder`, live or hidden, out of readers' sight at once and leaves its members to [`Writer::sweep`].
    /// The handle is dead from here on.
    pub fn retire(&mut self, holder: Holder) -> Result<(), Refused> {
        let live = self.entry(holder)?.state == State::Live;
        self.leave(holder);
        if live {
            self.show();
        }
        self.settle();
        Ok(())
    }

    fn leave(&mut self, holder: Holder) {
        let entry = &mut self.holders[holder.number as usize];
        entry.state = State::Gone;
        entry.left = self.limbo.stamp();
        // An empty one has nothing to sweep.
        if entry.digest.count == 0 { self.swept.push_back(holder.number) } else { self.leaving.push(holder.number) }
    }

    /// Empties `holder` in one step by retiring it: the returned handle, live if `holder` was, takes its place.
    pub fn clear(&mut self, holder: Holder) -> Result<Holder, Refused> {
        let Entry { held, state, .. } = *self.entry(holder)?;
        let new = self.open(held.engine, held.kind)?;
        if state == State::Live { self.publish(new).map(|_| new) } else { self.retire(holder).map(|()| new) }
    }

    /// The live holder of an engine and a kind.
    pub fn live(&self, engine: u32, kind: SetKind) -> Option<Holder> {
        let is = |entry: &Entry| entry.state == State::Live && entry.held == Held { engine, kind };
        let number = self.holders.iter().position(is)?;
        Some(Holder { number: number as u32, generation: self.holders[number].generation })
    }

    /// Adds members: for closed kinds parents first, so that the set is closed at every instant.
    pub fn store(&mut self, holder: Holder, fingerprints: &[Fingerprint]) -> Result<Changed, Refused> {
        self.change(holder, fingerprints, true)
    }

    /// Removes members: for closed kinds deepest first.
    pub fn remove(&mut self, holder: Holder, fingerprints: &[Fingerprint]) -> Result<Changed, Refused> {
        self.change(holder, fingerprints, false)
    }

    fn change(&mut self, holder: Holder, fingerprints: &[Fingerprint], store: bool) -> Result<Changed, Refused> {
        self.entry(holder)?;
        let Writer { table, sets, limbo, holders, recount, .. } = self;
        let digest = &mut holders[holder.number as usize].digest;
        let mut recount = recount.as_mut().filter(|recount| recount.holder == holder);
        let mut run = Run::default();
        let mut changed = 0;
        for (at, &fingerprint) in fingerprints.iter().enumerate() {
            if let Some(next) = fingerprints.get(at + AHEAD) {
                table.prefetch(*next);
            }
            if fingerprint == 0 {
                continue;
            }
            let (spread, segment) = table.segment(fingerprint);
            let mut found = segment.search(spread, fingerprint, limbo);
            if store && matches!(found, Found::Full) {
                table.make_room(spread, limbo);
                found = table.segment(fingerprint).1.search(spread, fingerprint, limbo);
            }
            let segment = table.segment(fingerprint).1;
            match found {
                Found::At(spot, set) => {
                    let to = run.step(set, sets, limbo, |sets, limbo| match store {
                        true => sets.with(set, holder.number, limbo),
                        false => sets.without(set, holder.number, limbo),
                    });
                    if to == set {
                        continue;
                    }
                    if to != 0 {
                        segment.set(spot, to);
                    } else {
                        segment.empty(spread, spot, limbo.stamp());
                        table.counted(false);
                        if table.is_sparse(spread) {
                            table.tidy(spread, limbo);
                        }
                    }
                }
                Found::Free(spot) if store => {
                    let to = run.step(0, sets, limbo, |sets, limbo| sets.with(0, holder.number, limbo));
                    segment.fill(spread, spot, fingerprint, to);
                    table.counted(true);
                }
                Found::Free(_) | Found::Full => continue,
            }
            changed += 1;
            if store { digest.insert(fingerprint) } else { digest.remove(fingerprint) }
            if let Some(recount) = recount.as_mut().filter(|recount| spread < recount.cursor) {
                if store { recount.digest.insert(fingerprint) } else { recount.digest.remove(fingerprint) }
            }
        }
        run.end(sets, limbo);
        self.settle();
        Ok(Changed { changed, unchanged: fingerprints.len() as u64 - changed })
    }

    /// Count and sum of the holder's members, kept up to date by every real change.
    pub fn digest(&self, holder: Holder) -> Result<Digest, Refused> {
        self.entry(holder).map(|entry| entry.digest)
    }

    /// Walks on with counting `holder`'s members in the table itself, about `budget` slots of it; changes in between
    /// are allowed. `Some` when the walk is through: equal to [`Writer::digest`], or the core has a fault. One walk at
    /// a time: asking for another holder starts anew.
    pub fn recount(&mut self, holder: Holder, budget: usize) -> Result<Option<Digest>, Refused> {
        self.entry(holder)?;
        let fresh = || Recount { holder, cursor: 0, digest: Digest::default() };
        let mut recount = self.recount.take().filter(|recount| recount.holder == holder).unwrap_or_else(fresh);
        let mut seen = 0;
        while seen < budget.max(1) {
            let Writer { table, sets, limbo, .. } = self;
            let (slots, next) = table.walk(recount.cursor, limbo, |_, fingerprint, set, _| {
                if sets.has(set, holder.number) {
                    recount.digest.insert(fingerprint);
                }
                set
            });
            seen += slots;
            match next {
                Some(cursor) => recount.cursor = cursor,
                None => return Ok(Some(recount.digest)),
            }
        }
        self.recount = Some(recount);
        self.settle();
        Ok(None)
    }

    /// Clears away what retired holders left, about `budget` slots of the table a call. `true` while there is more to
    /// do (also when all that is missing is that a reader leaves). Call it now and then even when nothing was retired:
    /// it also frees what readers held up.
    pub fn sweep(&mut self, budget: usize) -> bool {
        let mut seen = 0;
        while seen < budget.max(1) {
            let Some(mut pass) = self.pass.take().or_else(|| self.next_pass()) else { break };
            let Writer { table, sets, limbo, .. } = self;
            let mut run = Run::default();
            let Pass { mask, bits: left, cursor, .. } = &mut pass;
            let (slots, next) = table.walk(*cursor, limbo, |_, _, set, limbo| {
                let to = run.step(set, sets, limbo, |sets, limbo| sets.without_all(set, mask, limbo));
                if to != set {
                    let bits = sets.bits(set);
                    let masks = mask.get(bits.first..).unwrap_or(&[]);
                    *left -= bits.words.iter().zip(masks).map(|(w, m)| u64::from((w & m).count_ones())).sum::<u64>();
                }
                to
            });
            run.end(sets, limbo);
            seen += slots;
            match next.filter(|_| pass.bits > 0) {
                Some(cursor) => self.pass = Some(Pass { cursor, ..pass }),
                None => self.swept.extend(pass.numbers),
            }
        }
        self.settle();
        self.pass.is_some() || !self.leaving.is_empty() || !self.swept.is_empty()
    }

    fn next_pass(&mut self) -> Option<Pass> {
        if self.leaving.is_empty() {
            return None;
        }
        let numbers = std::mem::take(&mut self.leaving);
        let mut mask = vec![0; self.holders.len().div_ceil(64)];
        numbers.iter().for_each(|number| bit(&mut mask, *number as usize));
        let bits = numbers.iter().map(|number| self.holders[*number as usize].digest.count).sum();
        Some(Pass { mask, numbers, bits, cursor: 0 })
    }

    /// All members of `holder`, a walk over the whole table: for tests and the debug face.
    pub fn members(&self, holder: Holder) -> Result<Vec<Fingerprint>, Refused> {
        let mut members = Vec::with_capacity(self.entry(holder)?.digest.count as usize);
        self.table.each(|fingerprint, set| {
            if self.sets.has(set, holder.number) {
                members.push(fingerprint);
            }
        });
        Ok(members)
    }

    /// Counts and sizes.
    pub fn stats(&self) -> Stats {
        let retired = self.leaving.len() + self.swept.len() + self.pass.as_ref().map_or(0, |pass| pass.numbers.len());
        Stats {
            slots: self.table.slots() as u64,
            used: self.table.live() as u64,
            sets: self.sets.len() as u64,
            transitions: self.sets.transitions() as u64,
            holders: self.holders.iter().filter(|entry| entry.state != State::Gone).count() as u64,
            retired: retired as u64,
            table_bytes: self.table.bytes() as u64,
            sets_bytes: self.sets.bytes() as u64,
            limbo_bytes: self.limbo.bytes() as u64,
        }
    }

    /// Another reader.
    pub fn reader(&self) -> Reader {
        Reader::new(&self.core)
    }
}

/// Looks things up. Never waits for the writer, and allocates nothing once its buffers have grown to the size of the
/// fleet. Clone one for each thread or task; a clone is cheap but not free (a lock and three small buffers).
#[derive(Clone)]
pub struct Reader {
    seat: Seat,
    levels: Levels,
    core: Arc<Core>,
}

/// What a pinned reader looks at.
struct Sight<'a> {
    directory: &'a Directory,
    sets: &'a Slab<Record>,
    pin: &'a Pin<'a>,
}

impl View for Sight<'_> {
    #[inline]
    fn set_of(&self, fingerprint: Fingerprint) -> u32 {
        self.directory.get(fingerprint, self.pin)
    }

    #[inline]
    fn bits(&self, set: u32) -> Bits<'_> {
        self.sets.get(set).map_or(Bits { first: 0, words: &[] }, Record::bits)
    }

    #[inline]
    fn prefetch(&self, fingerprint: Fingerprint) {
        self.directory.prefetch(fingerprint, self.pin);
    }
}

impl Core {
    fn sight<'a>(&'a self, pin: &'a Pin<'a>) -> Sight<'a> {
        Sight { directory: self.directory.get(pin), sets: &self.sets, pin }
    }
}

impl Reader {
    fn new(core: &Arc<Core>) -> Reader {
        Reader { seat: Seat::take(&core.pins), levels: Levels::default(), core: core.clone() }
    }

    /// For each live holder of kind gpu or any that has `fingerprints[0]`: how many blocks of the prompt it has, from
    /// the start. `fingerprints` are the prompt's, in order. The answer keeps what it saw from being reclaimed, so
    /// drop it soon.
    pub fn find<'a>(&'a mut self, fingerprints: &'a [Fingerprint]) -> Answer<'a> {
        // The map before the table: a holder seen here has all that was stored before it was published.
        let map = self.seat.pin().hold(&self.core.map);
        self.levels.find(&self.core.sight(map.pin()), &map.closed, fingerprints);
        Answer { map, levels: &self.levels, core: &self.core, fingerprints }
    }

    /// Calls `each` for every live holder, of any kind, that has `fingerprint`.
    pub fn holders_of(&mut self, fingerprint: Fingerprint, mut each: impl FnMut(Held)) {
        let pin = self.seat.pin();
        let map = self.core.map.get(&pin);
        let sight = self.core.sight(&pin);
        let Bits { first, words } = sight.bits(sight.set_of(fingerprint));
        for (word, (bits, live)) in words.iter().zip(map.live.iter().skip(first)).enumerate() {
            ones(bits & live).for_each(|one| each(map.held[(first + word) * 64 + one]));
        }
    }
}

fn ones(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let one = (word != 0).then(|| word.trailing_zeros() as usize);
        word &= word.wrapping_sub(1);
        one
    })
}

/// What a lookup found. Each live gpu and any holder of block 0 is in it exactly once.
pub struct Answer<'a> {
    map: Pinned<'a, Map>,
    levels: &'a Levels,
    core: &'a Core,
    fingerprints: &'a [Fingerprint],
}

impl Answer<'_> {
    /// `(depth in blocks, 1 or more; the holders that have just so many)`, ascending.
    pub fn levels(&self) -> impl Iterator<Item = (u32, impl Iterator<Item = Held>)> {
        let held = |number: usize| self.map.held[number];
        self.levels.iter().map(move |(depth, bits)| {
            let words = bits.words.iter().enumerate();
            (depth, words.flat_map(move |(at, word)| ones(*word).map(move |one| held((bits.first + at) * 64 + one))))
        })
    }

    /// Every holder with its depth in blocks (1 or more), shallow ones first.
    pub fn iter(&self) -> impl Iterator<Item = (Held, u32)> {
        self.levels().flat_map(|(depth, holders)| holders.map(move |held| (held, depth)))
    }

    /// Fills `depths` by engine slot with `[gpu, any]` in blocks, 0 where nothing is held; as long as the highest
    /// live engine slot asks for.
    pub fn depths(&self, depths: &mut Vec<[u32; 2]>) {
        depths.clear();
        depths.resize(self.map.engines, [0; 2]);
        for (depth, bits) in self.levels.iter() {
            for (at, word) in bits.words.iter().enumerate() {
                for one in ones(*word) {
                    let held = self.map.held[(bits.first + at) * 64 + one];
                    depths[held.engine as usize][held.kind.index()] = depth;
                }
            }
        }
    }

    /// The deepest place where a hit may end on `engine`: the greatest depth `d <= from`, `d > from - back`, such
    /// that its live *ends* set has block `d - 1`. `None` if there is none so near, or the engine has no such set.
    pub fn deepest(&self, engine: u32, from: u32, back: u32) -> Option<u32> {
        let number = self.map.ends.get(engine as usize)?.checked_sub(1)?;
        let from = self.fingerprints.len().min(from as usize);
        let sight = self.core.sight(self.map.pin());
        let has = |fingerprint| sight.bits(sight.set_of(fingerprint)).has(number);
        let window = from.saturating_sub(back as usize)..from;
        window.rev().find(|at| has(self.fingerprints[*at])).map(|at| at as u32 + 1)
    }
}
