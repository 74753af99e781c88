//! Is what an index believes of an engine what the engine's own block pool holds?
//!
//! The pool speaks in the engine's hashes, the index in fingerprints. All token sequences that were ever sent are
//! known here, with both names of every block, so the pool's content can be said in fingerprints.

use proto::block::{Fingerprint, chain};
use std::collections::{BTreeSet, HashMap};

/// All blocks that can be in a pool, by both names.
#[derive(Debug)]
pub struct Known {
    root: Fingerprint,
    block_size: usize,
    /// The engine's hash -> fingerprint.
    names: HashMap<Vec<u8>, Fingerprint>,
    /// Fingerprints of each sequence.
    chains: BTreeSet<Vec<Fingerprint>>,
}

/// One engine, compared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Compared {
    /// Reachable blocks of the pool.
    pub held: u64,
    /// Held, and not in the index's set.
    pub missing: u64,
    /// In the index's set, and not held.
    pub surplus: u64,
    /// Cached in the pool, and of no sequence that was sent.
    pub strange: u64,
    /// Blocks by which the index's answers to lookups differ from what is held.
    pub misjudged: u64,
}

impl Compared {
    /// Everything that is not as it should be.
    pub fn wrong(&self) -> u64 {
        self.missing + self.surplus + self.strange + self.misjudged
    }
}

impl Known {
    /// `root` is fp(-1) of the only namespace that is used.
    pub fn new(root: Fingerprint, block_size: u32) -> Known {
        Known { root, block_size: block_size as usize, names: HashMap::new(), chains: BTreeSet::new() }
    }

    /// A sequence that was sent or answered, with the engine's hashes of its full blocks. False when their numbers differ.
    pub fn add(&mut self, tokens: &[u32], hashes: &[Vec<u8>]) -> bool {
        let fingerprints = chain(self.root, self.block_size, tokens);
        if fingerprints.len() != hashes.len() {
            return false;
        }
        self.names.extend(hashes.iter().cloned().zip(fingerprints.iter().copied()));
        self.chains.insert(fingerprints);
        true
    }

    /// The fingerprints of each sequence, none twice.
    pub fn chains(&self) -> impl Iterator<Item = &[Fingerprint]> {
        self.chains.iter().map(Vec::as_slice)
    }

    /// Compares the hashes in an engine's pool with what the index says: `published` is its set for the engine, and
    /// `depths` are the leading blocks that it answers for each of [`Known::chains`], in that order.
    pub fn compare<'a>(
        &self,
        pool: impl Iterator<Item = &'a [u8]>,
        published: &BTreeSet<Fingerprint>,
        depths: &[u32],
    ) -> Compared {
        let mut resident = BTreeSet::new();
        let mut strange = BTreeSet::new();
        for hash in pool {
            match self.names.get(hash) {
                Some(fingerprint) => resident.insert(*fingerprint),
                None => strange.insert(hash),
            };
        }
        // Reachable: resident, and so is everything before it. A sequence names its blocks in order.
        let mut held = BTreeSet::new();
        let mut misjudged = 0;
        for (chain, answered) in self.chains().zip(depths) {
            let depth = chain.iter().take_while(|fp| resident.contains(fp)).count();
            held.extend(&chain[..depth]);
            misjudged += (depth as u64).abs_diff(u64::from(*answered));
        }
        Compared {
            held: held.len() as u64,
            missing: held.difference(published).count() as u64,
            surplus: published.difference(&held).count() as u64,
            strange: strange.len() as u64,
            misjudged,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(name: &str) -> Vec<u8> {
        name.as_bytes().to_vec()
    }

    fn known() -> Known {
        let mut known = Known::new(9, 2);
        assert!(known.add(&[1, 2, 3, 4, 5, 6], &[hash("a"), hash("b"), hash("c")]));
        assert!(known.add(&[1, 2, 7, 8, 9], &[hash("a"), hash("d")]));
        known
    }

    /// Compares a pool with a set in which `long` leading blocks of the sequence a b c and `short` of a d are.
    fn compare(pool: &[&str], long: u32, short: u32) -> Compared {
        let known = known();
        let depths: Vec<u32> = known.chains().map(|c| if c.len() == 3 { long } else { short }).collect();
        let published = known.chains().zip(&depths).flat_map(|(c, depth)| c[..*depth as usize].to_vec()).collect();
        known.compare(pool.iter().map(|h| h.as_bytes()), &published, &depths)
    }

    #[test]
    fn equal_sets_are_equal() {
        assert_eq!(compare(&["a", "b", "d"], 2, 2), Compared { held: 3, ..Default::default() });
    }

    #[test]
    fn an_orphan_is_not_held() {
        assert_eq!(compare(&["a", "c"], 1, 1), Compared { held: 1, ..Default::default() });
    }

    #[test]
    fn every_difference_shows() {
        let wrong = |missing, surplus, strange, misjudged| Compared { held: 0, missing, surplus, strange, misjudged };
        let found = |pool, long, short| Compared { held: 0, ..compare(pool, long, short) };
        assert_eq!(found(&["a", "b"], 1, 1), wrong(1, 0, 0, 1), "b is missing");
        assert_eq!(found(&["a"], 1, 2), wrong(0, 1, 0, 1), "d is surplus");
        assert_eq!(found(&["a", "x"], 1, 1), wrong(0, 0, 1, 0), "x is of no sequence");
        let known = known();
        let (set, pool) = (known.chains().flat_map(|c| c[..1].to_vec()).chain([77]).collect(), [b"a".as_slice()]);
        let compared = known.compare(pool.into_iter(), &set, &[1, 1]);
        assert_eq!(compared, Compared { held: 1, surplus: 1, ..Default::default() }, "a block that no sequence has");
        assert_eq!(compared.wrong(), 1);
    }

    #[test]
    fn a_wrong_number_of_hashes_is_refused() {
        assert!(!known().add(&[1, 2, 3, 4], &[hash("a")]));
    }
}
