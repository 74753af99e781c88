//! The flat table: fingerprint -> set id, in segments that grow, split, shrink and merge one at a time.
//!
//! A line of 64 bytes has five slots of 12 bytes and one count. Fingerprints are spread by a keyed multiplication; the
//! upper bits choose the segment (extendible hashing: the directory doubles, segments split alone), the next 32 bits
//! the line, so a segment may have any number of lines and stays between 2/3 and 7/8 full while it grows: 15 to 19
//! bytes a fingerprint. No operation moves more than one segment's slots.
//!
//! The count of a line is that of the fingerprints which found it full and went on to the next: where it is 0 a
//! search ends. So removal leaves no tombstones behind, only slots that must rest until every reader that saw the old
//! fingerprint in them has left: *a slot is never given another fingerprint under a reader's eyes*.
//!
//! What a reader relies on, in the order the writer writes: set before fingerprint (store), counts before fingerprint
//! (store), fingerprint before counts (removal). A search that misses a fingerprint ran beside its storing or removal.

mod segment;

pub(crate) use segment::Found;

use crate::shared::pins::{Limbo, Pin, Published};
use proto::block::Fingerprint;
use segment::{MIN_LINES, Segment, WAYS, spread};
use std::sync::Arc;

/// A segment with as many fingerprints splits instead of growing: some 14,000 x 3 ns is the longest step, and 50
/// million fingerprints make 5,000 segments, whose headers stay in a second-level cache.
const SPLIT: usize = 14_000;

/// The directory that readers start from.
pub(crate) struct Directory {
    bits: u32,
    entries: Box<[Published<Segment>]>,
    key: u64,
}

#[inline(always)]
fn entry(spread: u64, bits: u32) -> usize {
    // Two shifts: one by 64 would be none.
    (spread >> 1 >> (63 - bits)) as usize
}

impl Directory {
    /// The id of the set of `fingerprint`, 0 for nobody.
    #[inline(always)]
    pub(crate) fn get(&self, fingerprint: Fingerprint, pin: &Pin<'_>) -> u32 {
        let spread = spread(fingerprint, self.key);
        self.entries[entry(spread, self.bits)].get(pin).get(spread, fingerprint)
    }

    /// Has the line of `fingerprint` fetched.
    #[inline(always)]
    pub(crate) fn prefetch(&self, fingerprint: Fingerprint, pin: &Pin<'_>) {
        let spread = spread(fingerprint, self.key);
        let segment = self.entries[entry(spread, self.bits)].get(pin);
        segment.prefetch(spread);
    }
}

/// The table on the writer's side.
pub(crate) struct Table {
    directory: Arc<Published<Directory>>,
    /// What is in there now.
    shown: Arc<Directory>,
    bits: u32,
    entries: Vec<Arc<Segment>>,
    key: u64,
    live: usize,
    lines: usize,
    segments: usize,
}

impl Table {
    pub(crate) fn new(key: u64) -> Table {
        let segment = Arc::new(Segment::new(0, MIN_LINES));
        let entries = vec![segment];
        let shown = Arc::new(Self::directory_of(&entries, 0, key));
        let directory = Arc::new(Published::new(shown.clone()));
        Table { directory, shown, bits: 0, entries, key, live: 0, lines: MIN_LINES, segments: 1 }
    }

    fn directory_of(entries: &[Arc<Segment>], bits: u32, key: u64) -> Directory {
        Directory { bits, entries: entries.iter().cloned().map(Published::new).collect(), key }
    }

    /// Where readers find the directory.
    pub(crate) fn directory(&self) -> &Arc<Published<Directory>> {
        &self.directory
    }

    /// The segment of a fingerprint and what it was chosen by.
    #[inline]
    pub(crate) fn segment(&self, fingerprint: Fingerprint) -> (u64, &Segment) {
        let spread = spread(fingerprint, self.key);
        (spread, &self.entries[entry(spread, self.bits)])
    }

    /// Has the line of a fingerprint fetched.
    #[inline]
    pub(crate) fn prefetch(&self, fingerprint: Fingerprint) {
        let (spread, segment) = self.segment(fingerprint);
        segment.prefetch(spread);
    }

    /// One fingerprint more (`true`) or less: what [`Segment::fill`] and [`Segment::empty`] did.
    #[inline]
    pub(crate) fn counted(&mut self, more: bool) {
        self.live = if more { self.live + 1 } else { self.live - 1 };
    }

    /// Lines for `live` fingerprints to be two thirds full.
    fn roomy(live: usize) -> usize {
        (live * 3).div_ceil(2 * WAYS)
    }

    /// After [`Found::Full`]: makes the segment larger, splits it, or rids it of slots that rest.
    pub(crate) fn make_room(&mut self, spread: u64, limbo: &mut Limbo) {
        let old = self.entries[entry(spread, self.bits)].clone();
        // The directory never has more than a place for each 512 fingerprints, however unevenly they fall.
        let may_split = old.depth() < 31 && (512usize << old.depth()) <= self.live;
        if old.live() < SPLIT || !may_split {
            let new = Arc::new(Segment::new(old.depth(), Self::roomy(old.live() + 1)));
            self.pour(&old, &[&new]);
            return self.place(spread, &[new], &[&old], limbo);
        }
        if old.depth() == self.bits {
            self.entries = self.entries.iter().flat_map(|segment| [segment.clone(), segment.clone()]).collect();
            self.bits += 1;
            self.publish(limbo);
        }
        let upper = old
            .iter()
            .filter(|(_, fingerprint, _)| self::spread(*fingerprint, self.key) << old.depth() >> 63 == 1)
            .count();
        let halves =
            [old.live() - upper, upper].map(|live| Arc::new(Segment::new(old.depth() + 1, Self::roomy(live + 1))));
        self.pour(&old, &[&halves[0], &halves[1]]);
        self.place(spread, &halves, &[&old], limbo);
    }

    /// Is the segment of `spread` so empty that [`Table::tidy`] has something to do?
    #[inline]
    pub(crate) fn is_sparse(&self, spread: u64) -> bool {
        let segment = &self.entries[entry(spread, self.bits)];
        segment.live() * 5 / 2 < segment.slots() && (segment.lines() > MIN_LINES || segment.depth() > 0)
    }

    /// After removals around `spread`: makes the segment smaller, or one with its neighbour, for as long as that helps.
    pub(crate) fn tidy(&mut self, spread: u64, limbo: &mut Limbo) {
        while self.is_sparse(spread) {
            let old = self.entries[entry(spread, self.bits)].clone();
            let other = (old.depth() > 0).then(|| {
                let neighbour = spread ^ 1 << (64 - old.depth());
                self.entries[entry(neighbour, self.bits)].clone()
            });
            match other.filter(|other| other.depth() == old.depth() && (old.live() + other.live()) * 2 < SPLIT) {
                Some(other) => {
                    let new = Arc::new(Segment::new(old.depth() - 1, Self::roomy(old.live() + other.live())));
                    self.pour(&old, &[&new]);
                    self.pour(&other, &[&new]);
                    self.place(spread, &[new], &[&old, &other], limbo);
                    self.narrow(limbo);
                }
                None if old.lines() > MIN_LINES => {
                    let new = Arc::new(Segment::new(old.depth(), Self::roomy(old.live())));
                    self.pour(&old, &[&new]);
                    return self.place(spread, &[new], &[&old], limbo);
                }
                None => return,
            }
        }
    }

    /// Halves the directory for as long as no segment needs all of it.
    fn narrow(&mut self, limbo: &mut Limbo) {
        let before = self.bits;
        while self.bits > 0
            && self.segments * 2 <= self.entries.len()
            && self.entries.iter().all(|s| s.depth() < self.bits)
        {
            self.entries = self.entries.iter().step_by(2).cloned().collect();
            self.bits -= 1;
        }
        if self.bits != before {
            self.publish(limbo);
        }
    }

    fn publish(&mut self, limbo: &mut Limbo) {
        let bytes = self.shown.entries.len() * size_of::<usize>();
        self.shown = Arc::new(Self::directory_of(&self.entries, self.bits, self.key));
        self.directory.replace(self.shown.clone(), bytes, limbo);
    }

    /// Copies all of `old` into `new`, one segment or two halves, which nobody sees yet.
    fn pour(&self, old: &Segment, new: &[&Arc<Segment>]) {
        for (_, fingerprint, set) in old.iter() {
            let spread = spread(fingerprint, self.key);
            let upper = new.len() == 2 && spread << old.depth() >> 63 == 1;
            new[usize::from(upper)].add(spread, fingerprint, set);
        }
    }

    /// Shows `new` (one, or two halves) in the place of `old`.
    fn place(&mut self, spread: u64, new: &[Arc<Segment>], old: &[&Arc<Segment>], limbo: &mut Limbo) {
        // The range of the directory that all of it covers begins with `depth` bits of `spread`.
        let depth = new[0].depth() - u32::from(new.len() == 2);
        let span = 1usize << (self.bits - depth);
        let from = entry(spread, self.bits) / span * span;
        let bytes_each = |segment: &Segment| segment.bytes() >> (self.bits - segment.depth());
        for at in from..from + span {
            let segment = &new[(at - from) * new.len() / span];
            let was = std::mem::replace(&mut self.entries[at], segment.clone());
            let bytes = bytes_each(&was);
            self.shown.entries[at].replace(segment.clone(), bytes, limbo);
        }
        self.segments = self.segments + new.len() - old.len();
        self.lines += new.iter().map(|segment| segment.lines()).sum::<usize>();
        self.lines -= old.iter().map(|segment| segment.lines()).sum::<usize>();
    }

    /// Shows `f` the `(spread, fingerprint, set)` of each fingerprint of the segment at `cursor`; what it returns, a
    /// set or 0, is put there. Returns the slots seen and the next cursor, `None` at the end of the table. A cursor
    /// is a place in the order of spread values, so it stays good whatever splits or merges.
    pub(crate) fn walk(
        &mut self,
        cursor: u64,
        limbo: &mut Limbo,
        mut f: impl FnMut(u64, Fingerprint, u32, &mut Limbo) -> u32,
    ) -> (usize, Option<u64>) {
        let segment = self.entries[entry(cursor, self.bits)].clone();
        for (spot, fingerprint, set) in segment.iter() {
            let spread = spread(fingerprint, self.key);
            // A merge may have brought back what lies before the cursor.
            if spread < cursor {
                continue;
            }
            let new = f(spread, fingerprint, set, limbo);
            if new == 0 {
                segment.empty(spread, spot, limbo.stamp());
                self.counted(false);
            } else if new != set {
                segment.set(spot, new);
            }
        }
        let (slots, last) = (segment.slots(), cursor | u64::MAX.checked_shr(segment.depth()).unwrap_or(0));
        self.tidy(cursor, limbo);
        (slots, last.checked_add(1))
    }

    /// Shows `f` every `(fingerprint, set)`.
    pub(crate) fn each(&self, mut f: impl FnMut(Fingerprint, u32)) {
        let mut at = 0;
        while let Some(segment) = self.entries.get(at) {
            segment.iter().for_each(|(_, fingerprint, set)| f(fingerprint, set));
            at += 1 << (self.bits - segment.depth());
        }
    }

    /// Slots, used or not.
    pub(crate) fn slots(&self) -> usize {
        self.lines * WAYS
    }

    /// Fingerprints in it.
    pub(crate) fn live(&self) -> usize {
        self.live
    }

    /// Bytes of segments and both directories.
    pub(crate) fn bytes(&self) -> usize {
        self.lines * Segment::LINE_BYTES
            + self.segments * size_of::<Segment>()
            + self.entries.len() * size_of::<Arc<Segment>>()
            + self.entries.len() * size_of::<Published<Segment>>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::pins::Pins;

    #[test]
    fn fingerprints_that_all_want_one_line_do_not_blow_up_the_table() {
        // Only who knows the key can do this: fingerprints whose spread value is all zeros in its upper 16 bits.
        let pins = Pins::new();
        let (mut limbo, mut table) = (Limbo::new(&pins), Table::new(0));
        let unlucky = (1..).map(|n: u64| n.wrapping_mul(0x1000_0001)).filter(|fp| spread(*fp, 0) >> 48 == 0).take(400);
        for fingerprint in unlucky {
            loop {
                let (spread, segment) = table.segment(fingerprint);
                match segment.search(spread, fingerprint, &limbo) {
                    Found::Free(spot) => {
                        segment.fill(spread, spot, fingerprint, 1);
                        table.counted(true);
                        break;
                    }
                    Found::Full => table.make_room(spread, &mut limbo),
                    Found::At(..) => panic!("{fingerprint} twice"),
                }
            }
            limbo.advance();
        }
        assert_eq!(table.live(), 400);
        assert!(table.slots() < 800 && table.entries.len() == 1, "{} slots", table.slots());
    }
}
