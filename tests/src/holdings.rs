//! Is what an index believes of an engine what the engine's own block pool holds?
//!
//! The pool speaks in the engine's hashes, the index in fingerprints. All token sequences that were ever sent are
//! known here, with both names of every block, so the pool's content can be said in fingerprints.

use proto::block::{Fingerprint, chain};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// All blocks that can be in a pool, by both names.
#[derive(Debug)]
pub struct Known {
    root: Fingerprint,
    block_size: usize,
    /// The engine's hash -> fingerprint, and the fingerprint that it follows.
    names: HashMap<Vec<u8>, (Fingerprint, Fingerprint)>,
    /// Fingerprints of each sequence.
    chains: BTreeSet<Vec<Fingerprint>>,
}

/// One engine, compared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Compared {
    /// Reachable blocks of the pool.
    pub held: u64,
    /// Held, and not credited by the index.
    pub missing: u64,
    /// Credited by the index, and not held.
    pub surplus: u64,
    /// Cached in the pool, and of no sequence that was sent.
    pub strange: u64,
    /// By how much the index's own count of the engine's blocks differs from the pool's.
    pub miscounted: u64,
}

impl Compared {
    /// Everything that is not as it should be.
    pub fn wrong(&self) -> u64 {
        self.missing + self.surplus + self.strange + self.miscounted
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
        let mut parent = self.root;
        for (fingerprint, hash) in fingerprints.iter().zip(hashes) {
            self.names.insert(hash.clone(), (*fingerprint, parent));
            parent = *fingerprint;
        }
        self.chains.insert(fingerprints);
        true
    }

    /// The fingerprints of each sequence, none twice.
    pub fn chains(&self) -> impl Iterator<Item = &[Fingerprint]> {
        self.chains.iter().map(Vec::as_slice)
    }

    /// Compares the hashes in an engine's pool with what the index says: `depths` are the leading blocks that it
    /// credits of each of [`Known::chains`], in that order, and `counted` is how many blocks it says the engine has.
    pub fn compare<'a>(&self, pool: impl Iterator<Item = &'a [u8]>, depths: &[u32], counted: u64) -> Compared {
        let mut resident = BTreeMap::new();
        let mut strange = BTreeSet::new();
        for hash in pool {
            match self.names.get(hash) {
                Some((fingerprint, parent)) => drop(resident.insert(*fingerprint, *parent)),
                None => drop(strange.insert(hash)),
            }
        }
        // Reachable: resident, and so is everything before it. A sequence names its blocks in order.
        let mut held = BTreeSet::new();
        for chain in self.chains() {
            held.extend(chain.iter().take_while(|fp| resident.contains_key(fp)));
        }
        let credited: BTreeSet<Fingerprint> =
            self.chains().zip(depths).flat_map(|(chain, depth)| chain.iter().take(*depth as usize)).copied().collect();
        Compared {
            held: held.len() as u64,
            missing: held.difference(&credited).count() as u64,
            surplus: credited.difference(&held).count() as u64,
            strange: strange.len() as u64,
            miscounted: counted.abs_diff(held.len() as u64),
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

    /// Depths of the two sequences, by length: 3 blocks and 2.
    fn depths(known: &Known, long: u32, short: u32) -> Vec<u32> {
        known.chains().map(|c| if c.len() == 3 { long } else { short }).collect()
    }

    fn compare(pool: &[&str], long: u32, short: u32, counted: u64) -> Compared {
        let known = known();
        known.compare(pool.iter().map(|h| h.as_bytes()), &depths(&known, long, short), counted)
    }

    #[test]
    fn equal_sets_are_equal() {
        assert_eq!(compare(&["a", "b", "d"], 2, 2, 3), Compared { held: 3, ..Default::default() });
    }

    #[test]
    fn an_orphan_is_not_held() {
        assert_eq!(compare(&["a", "c"], 1, 1, 1), Compared { held: 1, ..Default::default() });
    }

    #[test]
    fn every_difference_shows() {
        assert_eq!(compare(&["a", "b"], 1, 1, 2).wrong(), 1, "b is missing");
        assert_eq!(compare(&["a"], 1, 2, 1).wrong(), 1, "d is credited");
        assert_eq!(compare(&["a", "x"], 1, 1, 1).wrong(), 1, "x is of no sequence");
        assert_eq!(compare(&["a"], 1, 1, 2).wrong(), 1, "the index counts a block that no sequence has");
    }

    #[test]
    fn a_wrong_number_of_hashes_is_refused() {
        assert!(!known().add(&[1, 2, 3, 4], &[hash("a")]));
    }
}
