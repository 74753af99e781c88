//! Readers and their answers.

use super::pins::{Pin, Pinned, Seat, Slab};
use super::{Core, Held, Map};
use crate::find::{Bits, Levels, View};
use crate::sets::Record;
use crate::table::Directory;
use proto::block::Fingerprint;
use proto::id::SetKind;
use std::sync::Arc;

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
    pub(super) fn new(core: &Arc<Core>) -> Reader {
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
        depths.resize(self.map.of.len(), [0; 2]);
        for (depth, bits) in self.levels.iter() {
            for (at, word) in bits.words.iter().enumerate() {
                for one in ones(*word) {
                    let held = self.map.held[(bits.first + at) * 64 + one];
                    depths[held.engine as usize][held.kind.index()] = depth;
                }
            }
        }
    }

    /// Does the live set of this kind of `engine` have the prompt's fingerprint `at`? What was read of the table is
    /// kept in `seen` for the other engines and kinds: clear it before the first question of a lookup.
    pub fn has(&self, seen: &mut Vec<u32>, engine: u32, kind: SetKind, at: usize) -> bool {
        const UNREAD: u32 = u32::MAX;
        let number = self.map.of.get(engine as usize).and_then(|kinds| kinds[kind.index()].checked_sub(1));
        let (Some(number), Some(fingerprint)) = (number, self.fingerprints.get(at)) else { return false };
        let sight = self.core.sight(self.map.pin());
        if seen.len() <= at {
            seen.resize(self.fingerprints.len(), UNREAD);
        }
        if seen[at] == UNREAD {
            seen[at] = sight.set_of(*fingerprint);
        }
        sight.bits(seen[at]).has(number)
    }
}
