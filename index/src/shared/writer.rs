//! The writer: holders come and go, memberships change, retired holders are swept away, digests are checked.

use super::pins::Limbo;
use super::{Changed, Core, Entry, Held, Holder, Limits, Map, Reader, Refused, State, Stats, bit};
use crate::sets::Sets;
use crate::table::{Found, Table};
use proto::block::Fingerprint;
use proto::digest::Digest;
use proto::id::SetKind;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

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
    fn step(
        &mut self,
        from: u32,
        sets: &mut Sets,
        limbo: &mut Limbo,
        to: impl FnOnce(&mut Sets, &Limbo) -> u32,
    ) -> u32 {
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
    pub(super) fn new(core: Arc<Core>, limits: Limits, limbo: Limbo, table: Table, sets: Sets) -> Writer {
        Writer {
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
        }
    }

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
            if store {
                digest.insert(fingerprint)
            } else {
                digest.remove(fingerprint)
            }
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
