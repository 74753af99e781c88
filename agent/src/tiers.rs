//! Blocks in tiers below the GPU, as KV connectors report them: by the engine's own hashes, without tokens.
//!
//! The engine's thread knows hash and name together when a block is cached on the GPU, and every block below was there
//! first. So it keeps the hashes of the blocks that were cached last, and counts for each name how many reports put it
//! below. What changed is told to the publisher when there is room; the table itself says what is still to be told.

use crate::record::Pen;
use proto::block::Fingerprint;
use proto::residency::{FingerprintMap, Link};
use std::collections::{HashMap, VecDeque};

/// How long a report of a connector that never reports removals counts, in milliseconds.
pub const ADVISORY_MS: u64 = 600_000;
/// Hashes remembered for each block of the pool: what was cached last, several times over.
const HASHES_A_BLOCK: usize = 4;
/// Reported blocks kept for each block of the pool, and at most: 2^20 are 16 million tokens at 16 a block, about
/// 100 MB; what is beyond is not counted as being below.
const BELOW_A_BLOCK: usize = 32;
const MOST_BELOW: usize = 1 << 20;

/// A medium whose name is not known: below the GPU for certain, since connectors report of nothing else; counted.
pub const UNKNOWN_MEDIUM: u8 = 3;

/// One report of a connector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    /// A block is in this medium now.
    Stored {
        /// The last 8 bytes of the engine's hash, big-endian.
        hash: u64,
        /// The medium, as a number of the caller's.
        medium: u8,
        /// The report is of one block of the pool; otherwise of as many as make one below, the last of which it names.
        single: bool,
    },
    /// It is not any more.
    Removed {
        /// As above.
        hash: u64,
        /// As above.
        medium: u8,
    },
    /// Nothing is below any more.
    Cleared,
}

#[derive(Debug, Clone, Copy)]
struct Name {
    fp: Fingerprint,
    parent: Link,
    adapter: u32,
}

#[derive(Debug)]
struct Below {
    names: Box<[Name]>,
    // Of a connector that reports removals, each report is a copy; others say the same again.
    copies: u32,
    until_ms: u64,
}

#[derive(Debug)]
struct Count {
    reports: u32,
    told: bool,
    name: Name,
}

/// The table.
#[derive(Debug)]
pub struct Tiers {
    // Blocks of the pool that make one below.
    factor: usize,
    // Removals are reported.
    lasting: bool,
    names: HashMap<u64, Name>,
    hashes: VecDeque<u64>,
    parents: FingerprintMap<Name>,
    most_hashes: usize,
    most_below: usize,
    below: HashMap<(u64, u8), Below>,
    // When advisory reports end, oldest first: one entry a report.
    ends: VecDeque<(u64, (u64, u8))>,
    counts: FingerprintMap<Count>,
    // Names of which told and counted may differ.
    owed: Vec<Fingerprint>,
    /// Reports of blocks whose hash is not known (any more), or beyond the bound.
    pub unknown: u64,
}

impl Tiers {
    /// Tiers below a pool of `blocks` blocks. `factor` blocks of the pool make one below; `lasting` says that the
    /// connector reports removals too, otherwise a report counts for [`ADVISORY_MS`].
    pub fn new(blocks: usize, factor: usize, lasting: bool) -> Self {
        Self {
            factor: factor.clamp(1, 1 << 10),
            lasting,
            names: HashMap::new(),
            hashes: VecDeque::new(),
            parents: FingerprintMap::default(),
            most_hashes: blocks.saturating_mul(HASHES_A_BLOCK),
            most_below: blocks.saturating_mul(BELOW_A_BLOCK).min(MOST_BELOW),
            below: HashMap::new(),
            ends: VecDeque::new(),
            counts: FingerprintMap::default(),
            owed: Vec::new(),
            unknown: 0,
        }
    }

    /// A block was cached on the GPU: its hash and its name.
    pub fn cached(&mut self, hash: u64, fp: Fingerprint, parent: Link, adapter: u32) {
        let name = Name { fp, parent, adapter };
        if self.names.insert(hash, name).is_some() {
            return;
        }
        self.parents.insert(fp, name);
        self.hashes.push_back(hash);
        if self.hashes.len() > self.most_hashes
            && let Some(old) = self.hashes.pop_front()
            && let Some(name) = self.names.remove(&old)
        {
            self.parents.remove(&name.fp);
        }
    }

    /// Takes a report at `now_ms`, on a clock that never goes back.
    pub fn report(&mut self, report: Report, now_ms: u64) {
        match report {
            Report::Stored { hash, medium, single } => {
                self.stored((hash, medium), if single { 1 } else { self.factor }, now_ms);
            }
            Report::Removed { hash, medium } => self.removed((hash, medium)),
            Report::Cleared => {
                let all: Vec<_> = self.below.keys().copied().collect();
                all.into_iter().for_each(|key| self.gone(key));
                self.ends.clear();
            }
        }
    }

    fn stored(&mut self, key: (u64, u8), blocks: usize, now_ms: u64) {
        let until_ms = now_ms.saturating_add(ADVISORY_MS);
        if let Some(known) = self.below.get_mut(&key) {
            known.until_ms = until_ms;
            known.copies = known.copies.saturating_add(1);
            return;
        }
        let Some(last) = self.names.get(&key.0).filter(|_| self.below.len() < self.most_below) else {
            self.unknown += 1;
            return;
        };
        let mut names = vec![*last];
        while names.len() < blocks
            && let Some(Link::Block(before)) = names.last().map(|name| name.parent)
            && let Some(name) = self.parents.get(&before)
        {
            names.push(*name);
        }
        for name in &names {
            let count = self.counts.entry(name.fp).or_insert(Count { reports: 0, told: false, name: *name });
            count.reports += 1;
            if count.reports == 1 {
                self.owed.push(name.fp);
            }
        }
        if !self.lasting {
            self.ends.push_back((until_ms, key));
        }
        self.below.insert(key, Below { names: names.into(), copies: 1, until_ms });
    }

    fn removed(&mut self, key: (u64, u8)) {
        match self.below.get_mut(&key) {
            Some(below) if self.lasting && below.copies > 1 => below.copies -= 1,
            _ => self.gone(key),
        }
    }

    fn gone(&mut self, key: (u64, u8)) {
        let Some(gone) = self.below.remove(&key) else { return };
        for name in &gone.names {
            if let Some(count) = self.counts.get_mut(&name.fp) {
                count.reports = count.reports.saturating_sub(1);
                if count.reports == 0 {
                    self.owed.push(name.fp);
                }
            }
        }
    }

    /// Ends advisory reports that are too old.
    pub fn expire(&mut self, now_ms: u64) {
        while let Some((until_ms, key)) = self.ends.front().copied()
            && until_ms <= now_ms
        {
            self.ends.pop_front();
            match self.below.get(&key).map(|below| below.until_ms) {
                Some(later) if later > now_ms => self.ends.push_back((later, key)),
                _ => self.gone(key),
            }
        }
    }

    /// The publisher forgot what it was told, as it does when the GPU's cache is emptied: everything is told anew.
    pub fn forgotten(&mut self) {
        self.counts.retain(|_, count| count.reports > 0);
        self.counts.values_mut().for_each(|count| count.told = false);
        self.owed = self.counts.keys().copied().collect();
    }

    /// Is something to be told?
    pub fn owes(&self) -> bool {
        !self.owed.is_empty()
    }

    /// Tells what changed, as far as there is room. `adapter` gives the name of an adapter's number.
    pub fn settle<'a>(&mut self, pen: &mut Pen, adapter: impl Fn(u32) -> &'a str) {
        while let Some(fp) = self.owed.last() {
            if let Some(count) = self.counts.get_mut(fp) {
                let below = count.reports > 0;
                if below != count.told {
                    let name = count.name;
                    if !pen.below(name.fp, name.parent, adapter(name.adapter), below) {
                        return;
                    }
                    count.told = below;
                }
                if !below {
                    self.counts.remove(fp);
                }
            }
            self.owed.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Record;
    use crate::ring;

    const ROOT: Link = Link::Root(1);

    /// What a publisher hears: (name, below).
    fn heard(tiers: &mut Tiers, pen: &mut Pen, reader: &mut ring::Reader) -> Vec<(u64, bool)> {
        tiers.settle(pen, |_| "");
        let (mut words, mut out) = (vec![], vec![]);
        while let Some(kind) = reader.pop(&mut words) {
            match Record::read(kind, &words) {
                Some(Record::Below { fp, below, .. }) => out.push((fp, below)),
                other => panic!("{other:?}"),
            }
        }
        out.sort_unstable();
        out
    }

    fn world(factor: usize, lasting: bool) -> (Tiers, Pen, ring::Reader) {
        let (writer, reader) = ring::ring(0);
        let mut tiers = Tiers::new(100, factor, lasting);
        for i in 0..8 {
            tiers.cached(100 + i, 10 + i, if i == 0 { ROOT } else { Link::Block(9 + i) }, 0);
        }
        (tiers, Pen::new(writer), reader)
    }

    fn stored(hash: u64, medium: u8) -> Report {
        Report::Stored { hash, medium, single: false }
    }

    #[test]
    fn a_block_is_below_while_one_medium_has_it() {
        let (mut tiers, mut pen, mut reader) = world(1, true);
        tiers.report(stored(100, 1), 0);
        tiers.report(stored(100, 1), 0);
        tiers.report(stored(100, 2), 0);
        tiers.report(stored(999, 1), 0);
        assert_eq!((heard(&mut tiers, &mut pen, &mut reader), tiers.unknown), (vec![(10, true)], 1));
        tiers.report(Report::Removed { hash: 100, medium: 2 }, 0);
        tiers.report(Report::Removed { hash: 100, medium: 1 }, 0);
        assert_eq!(heard(&mut tiers, &mut pen, &mut reader), []);
        tiers.report(Report::Removed { hash: 100, medium: 1 }, 0);
        assert_eq!(heard(&mut tiers, &mut pen, &mut reader), [(10, false)]);
        tiers.expire(u64::MAX);
        assert_eq!(heard(&mut tiers, &mut pen, &mut reader), []);
    }

    #[test]
    fn a_report_may_stand_for_several_blocks() {
        let (mut tiers, mut pen, mut reader) = world(4, true);
        tiers.report(stored(103, 1), 0);
        tiers.report(Report::Stored { hash: 105, medium: 1, single: true }, 0);
        tiers.report(Report::Removed { hash: 105, medium: 1 }, 0);
        assert_eq!(heard(&mut tiers, &mut pen, &mut reader), [10, 11, 12, 13].map(|fp| (fp, true)));
        tiers.forgotten();
        assert_eq!(heard(&mut tiers, &mut pen, &mut reader), [10, 11, 12, 13].map(|fp| (fp, true)));
        tiers.report(Report::Cleared, 0);
        assert_eq!(heard(&mut tiers, &mut pen, &mut reader), [10, 11, 12, 13].map(|fp| (fp, false)));
        tiers.forgotten();
        assert_eq!(heard(&mut tiers, &mut pen, &mut reader), []);
    }

    /// P10: a connector that only ever reports stores is believed for a while.
    #[test]
    fn p10_reports_without_removals_end_by_themselves() {
        let (mut tiers, mut pen, mut reader) = world(1, false);
        tiers.report(stored(100, 1), 0);
        tiers.report(stored(101, 1), 0);
        tiers.report(stored(101, 1), 5);
        assert_eq!(heard(&mut tiers, &mut pen, &mut reader).len(), 2);
        tiers.expire(ADVISORY_MS);
        assert_eq!(heard(&mut tiers, &mut pen, &mut reader), [(10, false)]);
        tiers.expire(ADVISORY_MS + 5);
        assert_eq!(heard(&mut tiers, &mut pen, &mut reader), [(11, false)]);
    }

    #[test]
    fn memory_is_bounded() {
        let (mut tiers, _pen, _reader) = world(1, true);
        for i in 0..100_000 {
            tiers.cached(1000 + i, 1000 + i, ROOT, 0);
            tiers.report(stored(1000 + i, 1), 0);
        }
        assert_eq!((tiers.names.len(), tiers.parents.len(), tiers.hashes.len()), (400, 400, 400));
        assert_eq!((tiers.below.len(), tiers.counts.len()), (3200, 3200));
        assert_eq!(tiers.unknown, 100_000 - 3200);
    }
}
