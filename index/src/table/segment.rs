//! One segment of the table: lines of slots. All that readers and the writer do to a slot is here.

use crate::shared::pins::{Limbo, prefetch};
use proto::block::Fingerprint;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Spreads fingerprints over 64 bits. They are hashes already: this only keeps who chooses them from choosing lines.
#[inline(always)]
pub(crate) fn spread(fingerprint: Fingerprint, key: u64) -> u64 {
    let product = u128::from(fingerprint ^ key) * 0x9E37_79B9_7F4A_7C15_u128;
    (product >> 64) as u64 ^ product as u64
}

pub(super) const WAYS: usize = 5;
/// Marks a set id that is none but the low 31 bits of the stamp of a removal: the slot rests.
const RESTS: u32 = 1 << 31;
/// Least lines of a segment.
pub(super) const MIN_LINES: usize = 8;
/// A search for a free slot longer than this many lines means that too many slots rest.
const LONG: usize = 12;

#[repr(align(64))]
#[derive(Default)]
struct Line {
    fingerprints: [AtomicU64; WAYS],
    sets: [AtomicU32; WAYS],
    passed_by: AtomicU32,
}

impl Line {
    /// The slot that has `fingerprint`.
    #[inline(always)]
    fn way(&self, fingerprint: Fingerprint) -> Option<usize> {
        // All five, without a branch for each: which one it is cannot be predicted.
        let mut found = 0u32;
        for (way, slot) in self.fingerprints.iter().enumerate() {
            found |= u32::from(slot.load(Ordering::Relaxed) == fingerprint) << way;
        }
        (found != 0).then(|| found.trailing_zeros() as usize % WAYS)
    }

    /// A slot that may take a fingerprint.
    #[inline]
    fn free(&self, limbo: &Limbo) -> Option<usize> {
        (0..WAYS).find(|way| {
            let set = self.sets[*way].load(Ordering::Relaxed);
            self.fingerprints[*way].load(Ordering::Relaxed) == 0 && (set == 0 || limbo.passed_low(set & !RESTS))
        })
    }

    fn count(&self, by: u32) {
        let count = self.passed_by.load(Ordering::Relaxed).wrapping_add(by);
        self.passed_by.store(count, Ordering::Release);
    }
}

/// Part of the table: the fingerprints whose spread value begins with the same `depth` bits.
pub(crate) struct Segment {
    depth: u32,
    lines: Box<[Line]>,
    /// Fingerprints in it. Only the writer looks.
    live: AtomicU32,
    /// Slots that rest. Only the writer looks.
    resting: AtomicU32,
}

/// Where a fingerprint is, or may go.
#[derive(Clone, Copy)]
pub(crate) struct Spot {
    line: u32,
    way: u32,
}

/// What a search of the writer found.
pub(crate) enum Found {
    /// Its slot and its set.
    At(Spot, u32),
    /// It is not there; it may go to this slot.
    Free(Spot),
    /// It is not there, and there is no slot for it before [`Table::make_room`].
    Full,
}

impl Segment {
    /// Bytes of a line.
    pub(super) const LINE_BYTES: usize = size_of::<Line>();

    pub(super) fn new(depth: u32, lines: usize) -> Segment {
        Segment {
            depth,
            lines: (0..lines.max(MIN_LINES)).map(|_| Line::default()).collect(),
            live: AtomicU32::new(0),
            resting: AtomicU32::new(0),
        }
    }

    pub(super) fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed) as usize
    }

    pub(super) fn slots(&self) -> usize {
        self.lines.len() * WAYS
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val::<[Line]>(&self.lines) + size_of::<Segment>()
    }

    /// Bits that all its fingerprints' spread values begin with.
    pub(super) fn depth(&self) -> u32 {
        self.depth
    }

    /// Lines.
    pub(super) fn lines(&self) -> usize {
        self.lines.len()
    }

    /// Has the line of a spread value fetched.
    #[inline(always)]
    pub(super) fn prefetch(&self, spread: u64) {
        prefetch(&self.lines[self.home(spread)]);
    }

    #[inline(always)]
    fn home(&self, spread: u64) -> usize {
        let place = (spread << self.depth) >> 32;
        ((place * self.lines.len() as u64) >> 32) as usize
    }

    #[inline(always)]
    fn after(&self, line: usize) -> usize {
        if line + 1 == self.lines.len() { 0 } else { line + 1 }
    }

    /// The set of `fingerprint`, 0 if it is not there.
    #[inline(always)]
    pub(super) fn get(&self, spread: u64, fingerprint: Fingerprint) -> u32 {
        let mut at = self.home(spread);
        for _ in 0..self.lines.len() {
            let line = &self.lines[at];
            let way = line.way(fingerprint);
            fence(Ordering::Acquire);
            if let Some(way) = way {
                let set = line.sets[way].load(Ordering::Acquire);
                return if set & RESTS == 0 { set } else { 0 };
            }
            if line.passed_by.load(Ordering::Acquire) == 0 {
                return 0;
            }
            at = self.after(at);
        }
        0
    }

    /// The writer's search.
    #[inline]
    pub(crate) fn search(&self, spread: u64, fingerprint: Fingerprint, limbo: &Limbo) -> Found {
        let mut at = self.home(spread);
        let mut free = None;
        let mut over = false;
        for steps in 0..self.lines.len() {
            let line = &self.lines[at];
            if !over {
                if let Some(way) = line.way(fingerprint) {
                    let spot = Spot { line: at as u32, way: way as u32 };
                    return Found::At(spot, line.sets[way].load(Ordering::Relaxed));
                }
                over = line.passed_by.load(Ordering::Relaxed) == 0;
            }
            if free.is_none() {
                let spot = |way| Spot { line: at as u32, way: way as u32 };
                free = line.free(limbo).map(spot);
            }
            match free {
                Some(spot) if over => {
                    let crowded = (self.live() + 1) * 8 > self.slots() * 7
                        || steps > LONG && self.resting.load(Ordering::Relaxed) as usize > self.slots() / 8;
                    return if crowded { Found::Full } else { Found::Free(spot) };
                }
                _ => at = self.after(at),
            }
        }
        free.map_or(Found::Full, Found::Free)
    }

    /// Puts a fingerprint into the free slot that [`Segment::search`] gave.
    pub(crate) fn fill(&self, spread: u64, spot: Spot, fingerprint: Fingerprint, set: u32) {
        let mut at = self.home(spread);
        while at != spot.line as usize {
            self.lines[at].count(1);
            at = self.after(at);
        }
        let (line, way) = (&self.lines[at], spot.way as usize);
        if line.sets[way].load(Ordering::Relaxed) != 0 {
            self.resting.store(self.resting.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
        }
        line.sets[way].store(set, Ordering::Relaxed);
        line.fingerprints[way].store(fingerprint, Ordering::Release);
        self.live.store(self.live.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Another set, not 0, for the fingerprint at `spot`.
    #[inline]
    pub(crate) fn set(&self, spot: Spot, set: u32) {
        self.lines[spot.line as usize].sets[spot.way as usize].store(set, Ordering::Release);
    }

    /// Takes the fingerprint at `spot` out. The slot rests until those who read at `stamp` have left.
    pub(crate) fn empty(&self, spread: u64, spot: Spot, stamp: u64) {
        let (line, way) = (&self.lines[spot.line as usize], spot.way as usize);
        self.resting.store(self.resting.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        line.sets[way].store(RESTS | stamp as u32 & !RESTS, Ordering::Release);
        line.fingerprints[way].store(0, Ordering::Release);
        let mut at = self.home(spread);
        while at != spot.line as usize {
            self.lines[at].count(u32::MAX);
            at = self.after(at);
        }
        self.live.store(self.live.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
    }

    /// Puts a fingerprint that is not there into a segment with room that nobody sees yet.
    pub(super) fn add(&self, spread: u64, fingerprint: Fingerprint, set: u32) {
        let mut at = self.home(spread);
        loop {
            let line = &self.lines[at];
            if let Some(way) = (0..WAYS).find(|way| line.fingerprints[*way].load(Ordering::Relaxed) == 0) {
                line.sets[way].store(set, Ordering::Relaxed);
                line.fingerprints[way].store(fingerprint, Ordering::Relaxed);
                break;
            }
            line.count(1);
            at = self.after(at);
        }
        self.live.store(self.live.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// `(where, fingerprint, set)` of all that is in it.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Spot, Fingerprint, u32)> + '_ {
        self.lines.iter().enumerate().flat_map(|(at, line)| {
            (0..WAYS).filter_map(move |way| {
                let fingerprint = line.fingerprints[way].load(Ordering::Relaxed);
                let set = line.sets[way].load(Ordering::Relaxed);
                (fingerprint != 0).then_some((Spot { line: at as u32, way: way as u32 }, fingerprint, set))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::pins::{Pins, Seat};

    #[test]
    fn a_slot_rests_until_its_readers_left() {
        let pins = Pins::new();
        let (mut limbo, mut seat) = (Limbo::new(&pins), Seat::take(&pins));
        let segment = Segment::new(0, MIN_LINES);
        let place = |fingerprint, limbo: &Limbo| match segment.search(spread(fingerprint, 7), fingerprint, limbo) {
            Found::Free(spot) => {
                segment.fill(spread(fingerprint, 7), spot, fingerprint, 1);
                (spot.line, spot.way)
            }
            _ => panic!("{fingerprint} is there, or finds no room"),
        };
        let first: Vec<_> = (1..=15).map(|fingerprint| place(fingerprint, &limbo)).collect();
        let pin = seat.pin();
        for fingerprint in 1..=15 {
            let spread = spread(fingerprint, 7);
            let Found::At(spot, 1) = segment.search(spread, fingerprint, &limbo) else {
                panic!("{fingerprint} is gone")
            };
            segment.empty(spread, spot, limbo.stamp());
            assert_eq!(segment.get(spread, fingerprint), 0);
        }
        limbo.advance();
        assert!((101..=115).all(|fingerprint| !first.contains(&place(fingerprint, &limbo))));
        drop(pin);
        // Of ten more, in a segment two thirds of whose free slots are those, some must fall there.
        limbo.advance();
        let last: Vec<_> = (201..=210).map(|fingerprint| place(fingerprint, &limbo)).collect();
        assert!(last.iter().any(|spot| first.contains(spot)));
        let is = |fingerprint| segment.get(spread(fingerprint, 7), fingerprint);
        assert!((101..=115).chain(201..=210).all(|fingerprint| is(fingerprint) == 1));
        assert!((1..=15).all(|fingerprint| is(fingerprint) == 0));
    }
}
