//! The digest of a set: count and a sum that any order of insertion and removal gives alike.
//!
//! The sum is over XXH3-128 of each fingerprint's 8 little-endian bytes, modulo 2^128. Two parties that changed
//! their digest only when a membership bit really changed, and hold equal digests at the same seq, hold equal sets.

use crate::block::Fingerprint;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

/// Count and sum of a set. The empty set is `Digest::default()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Digest {
    /// Members.
    pub count: u64,
    /// High and low half of the 128-bit sum (MessagePack has no 128-bit integer).
    pub sum: (u64, u64),
}

impl Digest {
    fn add(&mut self, value: u128) {
        let sum = self.value().wrapping_add(value);
        self.sum = ((sum >> 64) as u64, sum as u64);
    }

    fn value(&self) -> u128 {
        ((self.sum.0 as u128) << 64) | self.sum.1 as u128
    }

    /// `fingerprint` became a member. Only to be called when it was none.
    pub fn insert(&mut self, fingerprint: Fingerprint) {
        self.count = self.count.wrapping_add(1);
        self.add(xxh3_128(&fingerprint.to_le_bytes()));
    }

    /// `fingerprint` ceased to be a member. Only to be called when it was one.
    pub fn remove(&mut self, fingerprint: Fingerprint) {
        self.count = self.count.wrapping_sub(1);
        self.add(xxh3_128(&fingerprint.to_le_bytes()).wrapping_neg());
    }
}

impl FromIterator<Fingerprint> for Digest {
    /// The digest of a set given as distinct members.
    fn from_iter<I: IntoIterator<Item = Fingerprint>>(members: I) -> Self {
        let mut digest = Digest::default();
        members.into_iter().for_each(|fp| digest.insert(fp));
        digest
    }
}

/// The name of a bundle: XXH3-128 of its bytes, 32 hex digits.
pub fn of_bytes(bytes: &[u8]) -> String {
    format!("{:032x}", xxh3_128(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_does_not_matter_and_removal_undoes() {
        let mut a = Digest::from_iter([1, 2, 3]);
        assert_eq!(a, Digest::from_iter([3, 1, 2]));
        a.remove(2);
        assert_eq!(a, Digest::from_iter([3, 1]));
        a.remove(1);
        a.remove(3);
        assert_eq!(a, Digest::default());
    }

    #[test]
    fn a_swap_of_members_shows() {
        assert_ne!(Digest::from_iter([1, 2]), Digest::from_iter([1, 3]));
        // A 64-bit sum of the fingerprints themselves would miss this one.
        assert_ne!(Digest::from_iter([1, 4]), Digest::from_iter([2, 3]));
    }
}
