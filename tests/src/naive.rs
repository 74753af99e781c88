//! The simplest possible statement of what an engine's sets are, to test the real ones against.

use proto::block::Fingerprint;
use proto::residency::{Change, Link};
use std::collections::{BTreeMap, BTreeSet};

/// Copies of blocks in one tier. Everything else is computed from scratch when asked.
#[derive(Debug, Clone, Default)]
pub struct Copies(pub BTreeMap<Fingerprint, (Link, u32)>);

impl Copies {
    /// A copy arrived.
    pub fn add(&mut self, fp: Fingerprint, parent: Link) {
        self.0.entry(fp).or_insert((parent, 0)).1 += 1;
    }

    /// A copy is gone. False when there was none.
    pub fn drop(&mut self, fp: Fingerprint) -> bool {
        let Some((_, copies)) = self.0.get_mut(&fp) else { return false };
        *copies -= 1;
        if *copies == 0 {
            self.0.remove(&fp);
        }
        true
    }

    /// Resident blocks whose parents are reachable, by adding until nothing changes.
    pub fn reachable(&self) -> BTreeSet<Fingerprint> {
        let mut set = BTreeSet::new();
        loop {
            let before = set.len();
            for (fp, (parent, _)) in &self.0 {
                let ok = match parent {
                    Link::Root(_) => true,
                    Link::Block(parent) => set.contains(parent),
                };
                if ok {
                    set.insert(*fp);
                }
            }
            if set.len() == before {
                return set;
            }
        }
    }
}

/// Applies one change to a set that must be prefix-closed before and after it.
///
/// # Panics
/// When the change adds a member or orphan, or removes a stranger or a parent of a member. `parents` is every link
/// that was ever told.
pub fn apply(set: &mut BTreeSet<Fingerprint>, parents: &BTreeMap<Fingerprint, Link>, change: Change) {
    match change {
        Change::Added { parent, fp } => {
            if let Link::Block(parent) = parent {
                assert!(set.contains(&parent), "{fp} was added before its parent {parent}");
            }
            assert_eq!(parents.get(&fp), Some(&parent), "{fp} was told to follow another block");
            assert!(set.insert(fp), "{fp} was added twice");
        }
        Change::Removed { fp } => {
            assert!(set.remove(&fp), "{fp} was removed and was no member");
            let child = set.iter().find(|other| parents.get(other) == Some(&Link::Block(fp)));
            assert_eq!(child, None, "{fp} was removed before its child");
        }
    }
}
