//! The lookup: bisection over a prompt's fingerprints with a running intersection.
//!
//! Along a prompt the set of holders only shrinks, since every bisected set is prefix-closed. Equal set ids at two
//! positions mean that nothing changed between them, so a lookup reads about `log2(blocks)` slots for each depth at
//! which holders leave, not one for each block.
//!
//! Beside a writer two reads may disagree. The invariants below hold whatever is read: a holder sought between `lo`
//! and `hi` was read at block 0 and at `lo`, and is not to be found at `hi`; so it is answered once, with a depth whose
//! last block it was read at.

use proto::block::Fingerprint;

/// Part of a bit set: `words[i]` is word `first + i`, all others are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bits<'a> {
    /// Number of the first word.
    pub first: usize,
    /// 64 holders each, lowest bit first.
    pub words: &'a [u64],
}

impl Bits<'_> {
    /// Is `holder` in it?
    #[inline]
    pub fn has(&self, holder: u32) -> bool {
        let word = (holder as usize / 64).checked_sub(self.first).and_then(|word| self.words.get(word));
        word.is_some_and(|word| word >> (holder % 64) & 1 == 1)
    }
}

/// What a lookup reads.
pub trait View {
    /// The id of the set of holders of a fingerprint, 0 for nobody. Equal ids are equal sets for as long as the view
    /// is held.
    fn set_of(&self, fingerprint: Fingerprint) -> u32;
    /// The holders in a set.
    fn bits(&self, set: u32) -> Bits<'_>;
    /// A hint that a fingerprint will be asked for soon.
    fn prefetch(&self, _fingerprint: Fingerprint) {}
}

/// Holders that share a depth.
#[derive(Debug, Clone, Copy)]
struct Level {
    depth: u32,
    first: u32,
    start: u32,
    end: u32,
}

/// The buffers of a lookup and its answer. They grow to the size of the fleet and stay.
#[derive(Debug, Clone, Default)]
pub struct Levels {
    levels: Vec<Level>,
    words: Vec<u64>,
    /// A stack of bit sets, one a nesting of the bisection.
    stack: Vec<u64>,
}

/// Nestings of a bisection of up to 2^32 positions, and the two sets that start it.
const NESTINGS: usize = 34;

impl Levels {
    /// `(depth in blocks, the holders that have just so many)`, ascending and disjoint.
    pub fn iter(&self) -> impl Iterator<Item = (u32, Bits<'_>)> {
        self.levels.iter().map(|level| {
            let words = &self.words[level.start as usize..level.end as usize];
            (level.depth, Bits { first: level.first as usize, words })
        })
    }

    /// Looks up: afterwards [`Levels::iter`] has every holder of `mask` that has `fingerprints[0]`, once.
    pub fn find<V: View>(&mut self, view: &V, mask: &[u64], fingerprints: &[Fingerprint]) {
        self.levels.clear();
        self.words.clear();
        let (Some(&first), Some(&last)) = (fingerprints.first(), fingerprints.last()) else { return };
        let end = fingerprints.len() - 1;
        view.prefetch(first);
        view.prefetch(last);
        for at in [end / 2, end / 4, end / 2 + (end - end / 2) / 2] {
            view.prefetch(fingerprints[at]);
        }
        let id_first = view.set_of(first);
        if id_first == 0 {
            return;
        }
        let width = mask.len();
        if self.stack.len() < width * NESTINGS {
            self.stack.resize(width * NESTINGS, 0);
        }
        // sought = mask & first; found to the end = sought & last.
        let Levels { levels, words, stack } = self;
        let (whole, stack) = stack.split_at_mut(width);
        let sought = &mut stack[..width];
        intersect(mask, view.bits(id_first), sought);
        // One block is one read.
        let id_last = if end == 0 { id_first } else { view.set_of(last) };
        if id_last == id_first {
            return emit(levels, words, end + 1, sought);
        }
        if id_last == 0 {
            whole.fill(0);
        } else {
            intersect(sought, view.bits(id_last), whole);
            sought.iter_mut().zip(whole.iter()).for_each(|(sought, whole)| *sought &= !whole);
        }
        let mut search = Search { view, fingerprints, levels, words };
        if sought.iter().any(|word| *word != 0) {
            search.split((0, id_first), (end, id_last), stack, width);
        }
        emit(search.levels, search.words, end + 1, whole);
    }
}

/// `out = a & b`.
fn intersect(a: &[u64], b: Bits<'_>, out: &mut [u64]) {
    out.fill(0);
    if let (Some(a), Some(out)) = (a.get(b.first..), out.get_mut(b.first..)) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b.words) {
            *out = a & b;
        }
    }
}

fn emit(levels: &mut Vec<Level>, words: &mut Vec<u64>, depth: usize, set: &[u64]) {
    let Some(first) = set.iter().position(|word| *word != 0) else { return };
    let last = set.iter().rposition(|word| *word != 0).unwrap_or(first);
    let start = words.len() as u32;
    words.extend_from_slice(&set[first..=last]);
    levels.push(Level { depth: depth as u32, first: first as u32, start, end: words.len() as u32 });
}

struct Search<'a, V> {
    view: &'a V,
    fingerprints: &'a [Fingerprint],
    levels: &'a mut Vec<Level>,
    words: &'a mut Vec<u64>,
}

impl<V: View> Search<'_, V> {
    /// Answers the holders in `stack[..width]`, none of them empty-handed: all were read at `low`, where the set's id
    /// was `id_low`, and none is in the set `id_high`, read at `high`.
    fn split(&mut self, low: (usize, u32), high: (usize, u32), stack: &mut [u64], width: usize) {
        let ((mut low, mut id_low), (mut high, mut id_high)) = (low, high);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            // One step ahead, either way.
            let (left, right) = (low + (middle - low) / 2, middle + (high - middle) / 2);
            for at in [left, right] {
                self.view.prefetch(self.fingerprints[at]);
            }
            let id = self.view.set_of(self.fingerprints[middle]);
            // Equal ids: all of the sought are at `middle`, or none.
            if id == id_low {
                low = middle;
                continue;
            }
            if id == id_high || id == 0 {
                (high, id_high) = (middle, id);
                continue;
            }
            // Split the sought: those at `middle` stay in place, the others go to the next place of the stack.
            let (here, rest) = stack.split_at_mut(width);
            let gone = &mut rest[..width];
            let bits = self.view.bits(id);
            gone.copy_from_slice(here);
            intersect(gone, bits, here);
            let (mut any_here, mut any_gone) = (0, 0);
            for (gone, here) in gone.iter_mut().zip(here.iter()) {
                *gone &= !here;
                any_gone |= *gone;
                any_here |= here;
            }
            if any_here == 0 {
                here.copy_from_slice(gone);
                (high, id_high) = (middle, id);
            } else {
                if any_gone != 0 {
                    self.split((low, id_low), (middle, id), rest, width);
                }
                (low, id_low) = (middle, id);
            }
        }
        emit(self.levels, self.words, low + 1, &stack[..width]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Position = fingerprint - 1. What a lookup reads beside a writer: at each position any set at all, closed or not.
    struct Flicker {
        sets: Vec<u32>,
        reads: std::cell::RefCell<Vec<usize>>,
        words: Vec<u64>,
    }

    impl View for Flicker {
        fn set_of(&self, fingerprint: Fingerprint) -> u32 {
            let at = fingerprint as usize - 1;
            self.reads.borrow_mut()[at] += 1;
            self.sets[at]
        }
        fn bits(&self, set: u32) -> Bits<'_> {
            // A set's id is its word.
            Bits { first: 0, words: &self.words[set as usize..=set as usize] }
        }
    }

    #[test]
    fn whatever_is_read_each_holder_is_answered_once_with_what_was_read() {
        let mut state = 1u64;
        let mut random = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        let mut levels = Levels::default();
        for case in 0..20_000 {
            let blocks = 1 + random(20) as usize;
            let sets = (0..blocks).map(|_| (random(64) | random(64)) as u32).collect();
            let view = Flicker { sets, reads: vec![0; blocks].into(), words: (0..64).collect() };
            let mask = random(64) | random(64);
            let prompt: Vec<u64> = (1..=blocks as u64).collect();
            levels.find(&view, &[mask], &prompt);
            let reads = view.reads.borrow();
            assert!(reads.iter().all(|reads| *reads <= 1), "case {case}: {reads:?}");
            let mut answered = 0u64;
            let mut before = 0;
            for (depth, bits) in levels.iter() {
                let holders = bits.words[0];
                assert!(depth > before && depth as usize <= blocks && holders != 0, "case {case}");
                assert_eq!(holders & answered, 0, "case {case}: a holder twice");
                let (first, last) = (view.sets[0], view.sets[depth as usize - 1]);
                assert_eq!(holders & !(u64::from(first & last) & mask), 0, "case {case}: a holder without its block");
                answered |= holders;
                before = depth;
            }
            assert_eq!(answered, u64::from(view.sets[0]) & mask, "case {case}: a holder is missing");
        }
    }
}
