//! The concurrent core: one [`Writer`], any number of [`Reader`]s, and what they share.
//!
//! The table says, for each fingerprint, which *holders* have it. A holder is one generation of one set of one
//! engine: [`Writer::open`] gives a hidden one, [`Writer::publish`] makes it that engine's live set of its kind and
//! retires the one before it in the same swap, so the arrival of a snapshot, a clear, a purge and a restart are each
//! one step to readers. What a retired holder leaves in the table is swept away by [`Writer::sweep`] in bounded steps.
//!
//! Promise of [`Reader::find`] beside a busy writer: a holder answered with depth `d` held block `d - 1` at some
//! instant of the lookup, and held block 0, and was live when the lookup began.

use proto::block::Fingerprint;
use proto::digest::Digest;
use proto::id::SetKind;
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex};

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

#[derive(Default)]
struct Naive {
    holders: BTreeMap<u32, (Held, bool, HashSet<Fingerprint>)>,
    next: u32,
}

/// A core with nobody in it: its writer and a first reader.
pub fn open(limits: Limits) -> (Writer, Reader) {
    let naive = Arc::new(Mutex::new(Naive::default()));
    (Writer { naive: naive.clone(), limits }, Reader { naive })
}

/// The only hand that changes the table. Not `Clone`; it may move between threads.
pub struct Writer {
    naive: Arc<Mutex<Naive>>,
    limits: Limits,
}

impl Writer {
    fn with<T>(&mut self, holder: Holder, f: impl FnOnce(&mut Held, &mut bool, &mut HashSet<u64>) -> T) -> Result<T, Refused> {
        let mut naive = self.naive.lock().unwrap_or_else(|e| e.into_inner());
        match naive.holders.get_mut(&holder.number) {
            Some((held, live, set)) => Ok(f(held, live, set)),
            None => Err(Refused::Retired { number: holder.number, generation: holder.generation }),
        }
    }

    /// A new, empty, hidden holder for an engine slot and a kind.
    pub fn open(&mut self, engine: u32, kind: SetKind) -> Result<Holder, Refused> {
        if engine >= self.limits.engines {
            return Err(Refused::NoSuchEngine { engine, limit: self.limits.engines });
        }
        let mut naive = self.naive.lock().unwrap_or_else(|e| e.into_inner());
        let number = naive.next;
        naive.next += 1;
        naive.holders.insert(number, (Held { engine, kind }, false, HashSet::new()));
        Ok(Holder { number, generation: 0 })
    }

    /// Makes `holder` the live one of its engine and kind. The one before it is retired in the same swap and returned.
    /// Publishing a live holder changes nothing and returns `None`.
    pub fn publish(&mut self, holder: Holder) -> Result<Option<Holder>, Refused> {
        let held = self.with(holder, |held, _, _| *held)?;
        let old = self.live(held.engine, held.kind);
        if old == Some(holder) {
            return Ok(None);
        }
        if let Some(old) = old {
            self.retire(old)?;
        }
        self.with(holder, |_, live, _| *live = true)?;
        Ok(old)
    }

    /// Takes `holder`, live or hidden, out of readers' sight at once and leaves its members to [`Writer::sweep`].
    /// The handle is dead from here on.
    pub fn retire(&mut self, holder: Holder) -> Result<(), Refused> {
        self.with(holder, |_, _, _| ())?;
        self.naive.lock().unwrap_or_else(|e| e.into_inner()).holders.remove(&holder.number);
        Ok(())
    }

    /// Empties `holder` in one step by retiring it: the returned handle, live if `holder` was, takes its place.
    pub fn clear(&mut self, holder: Holder) -> Result<Holder, Refused> {
        let (held, live) = self.with(holder, |held, live, _| (*held, *live))?;
        let new = self.open(held.engine, held.kind)?;
        if live { self.publish(new)?; } else { self.retire(holder)?; }
        Ok(new)
    }

    /// The live holder of an engine and a kind.
    pub fn live(&self, engine: u32, kind: SetKind) -> Option<Holder> {
        let naive = self.naive.lock().unwrap_or_else(|e| e.into_inner());
        let mut all = naive.holders.iter();
        all.find(|(_, h)| h.0 == Held { engine, kind } && h.1).map(|(n, _)| Holder { number: *n, generation: 0 })
    }

    /// Adds members: for closed kinds parents first, so that the set is closed at every instant.
    pub fn store(&mut self, holder: Holder, fingerprints: &[Fingerprint]) -> Result<Changed, Refused> {
        self.with(holder, |_, _, set| {
            let changed = fingerprints.iter().filter(|fp| **fp != 0 && set.insert(**fp)).count() as u64;
            Changed { changed, unchanged: fingerprints.len() as u64 - changed }
        })
    }

    /// Removes members: for closed kinds deepest first.
    pub fn remove(&mut self, holder: Holder, fingerprints: &[Fingerprint]) -> Result<Changed, Refused> {
        self.with(holder, |_, _, set| {
            let changed = fingerprints.iter().filter(|fp| set.remove(fp)).count() as u64;
            Changed { changed, unchanged: fingerprints.len() as u64 - changed }
        })
    }

    /// Count and sum of the holder's members, kept up to date by every real change.
    pub fn digest(&self, holder: Holder) -> Result<Digest, Refused> {
        let naive = self.naive.lock().unwrap_or_else(|e| e.into_inner());
        match naive.holders.get(&holder.number) {
            Some((_, _, set)) => Ok(set.iter().copied().collect()),
            None => Err(Refused::Retired { number: holder.number, generation: holder.generation }),
        }
    }

    /// Walks on with counting `holder`'s members in the table itself, about `budget` slots of it; changes in between
    /// are allowed. `Some` when the walk is through: equal to [`Writer::digest`], or the core has a fault. One walk at
    /// a time: asking for another holder starts anew.
    pub fn recount(&mut self, holder: Holder, _budget: usize) -> Result<Option<Digest>, Refused> {
        self.digest(holder).map(Some)
    }

    /// Clears away what retired holders left, about `budget` slots of the table a call. `true` while there is more to
    /// do (also when all that is missing is that a reader leaves).
    pub fn sweep(&mut self, _budget: usize) -> bool {
        false
    }

    /// All members of `holder`, a walk over the whole table: for tests and the debug face.
    pub fn members(&self, holder: Holder) -> Result<Vec<Fingerprint>, Refused> {
        let naive = self.naive.lock().unwrap_or_else(|e| e.into_inner());
        match naive.holders.get(&holder.number) {
            Some((_, _, set)) => Ok(set.iter().copied().collect()),
            None => Err(Refused::Retired { number: holder.number, generation: holder.generation }),
        }
    }

    /// Counts and sizes.
    pub fn stats(&self) -> Stats {
        Stats::default()
    }

    /// Another reader.
    pub fn reader(&self) -> Reader {
        Reader { naive: self.naive.clone() }
    }
}

/// Looks things up. Never waits for the writer, and allocates nothing once its buffers have grown to the size of the
/// fleet. Clone one for each thread or task; a clone is cheap but not free (a lock and two small buffers).
#[derive(Clone)]
pub struct Reader {
    naive: Arc<Mutex<Naive>>,
}

impl Reader {
    /// For each live holder of kind gpu or any that has `fingerprints[0]`: how many blocks of the prompt it has, from
    /// the start. `fingerprints` are the prompt's, in order. The answer keeps what it saw from being reclaimed, so
    /// drop it soon.
    pub fn find<'a>(&'a mut self, fingerprints: &'a [Fingerprint]) -> Answer<'a> {
        let naive = self.naive.lock().unwrap_or_else(|e| e.into_inner());
        let mut all = vec![];
        let mut ends = vec![];
        for (held, live, set) in naive.holders.values().filter(|h| h.1) {
            let depth = fingerprints.iter().take_while(|fp| set.contains(fp)).count();
            if held.kind == SetKind::Ends { ends.push((held.engine, set.clone())); }
            else if *live && depth > 0 { all.push((*held, depth as u32)); }
        }
        Answer { all, ends, fingerprints, _reader: self }
    }

    /// Calls `each` for every live holder, of any kind, that has `fingerprint`.
    pub fn holders_of(&mut self, fingerprint: Fingerprint, mut each: impl FnMut(Held)) {
        let naive = self.naive.lock().unwrap_or_else(|e| e.into_inner());
        naive.holders.values().filter(|h| h.1 && h.2.contains(&fingerprint)).for_each(|h| each(h.0));
    }
}

/// What a lookup found. Each live gpu and any holder of block 0 is in it exactly once.
pub struct Answer<'a> {
    all: Vec<(Held, u32)>,
    ends: Vec<(u32, HashSet<Fingerprint>)>,
    fingerprints: &'a [Fingerprint],
    _reader: &'a Reader,
}

impl Answer<'_> {
    /// Every holder with its depth in blocks (1 or more), shallow ones first.
    pub fn iter(&self) -> impl Iterator<Item = (Held, u32)> + '_ {
        self.all.iter().copied()
    }

    /// Fills `depths` by engine slot with `[gpu, any]` in blocks, 0 where nothing is held; as long as the highest
    /// live engine slot asks for.
    pub fn depths(&self, depths: &mut Vec<[u32; 2]>) {
        depths.clear();
        for (held, depth) in self.iter() {
            if depths.len() <= held.engine as usize { depths.resize(held.engine as usize + 1, [0; 2]); }
            depths[held.engine as usize][held.kind.index()] = depth;
        }
    }

    /// The deepest place where a hit may end on `engine`: the greatest depth `d <= from`, `d > from - back`, such
    /// that its live *ends* set has block `d - 1`. `None` if there is none so near, or the engine has no such set.
    pub fn deepest(&self, engine: u32, from: u32, back: u32) -> Option<u32> {
        let set = &self.ends.iter().find(|e| e.0 == engine)?.1;
        let from = from.min(self.fingerprints.len() as u32);
        (from.saturating_sub(back) + 1..=from).rev().find(|d| set.contains(&self.fingerprints[*d as usize - 1]))
    }
}
