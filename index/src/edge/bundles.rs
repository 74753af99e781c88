//! Bundles fetched from agents, one a digest.

use super::board::Board;
use crate::answer::{Bundle, NoBundle};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// Most bundles kept: base models of one pool, and their successors during a rollout.
pub const MOST: usize = 16;
/// Most bytes kept over all of them. The least wanted are dropped: those that no engine names any more.
pub const MOST_BYTES: usize = 512 << 20;

/// What is known of one digest.
enum Place {
    /// A stream is fetching it; the number says which, so that its end frees the claim.
    Claimed(u64),
    Here(Arc<[u8]>),
    /// What came under this name was something else: not asked for again while an engine names it.
    Bad,
}

/// The store.
#[derive(Default)]
pub struct Bundles {
    places: Mutex<BTreeMap<String, Place>>,
}

impl Bundles {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Place>> {
        self.places.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Shall `stream` fetch this one? Only one stream does at a time.
    pub fn claim(&self, digest: &str, stream: u64) -> bool {
        let mut places = self.lock();
        if digest.is_empty() || places.contains_key(digest) || places.len() >= MOST {
            return false;
        }
        places.insert(digest.into(), Place::Claimed(stream));
        true
    }

    /// A stream gave up, or is gone: others may try.
    pub fn unclaim(&self, stream: u64) {
        self.lock().retain(|_, place| !matches!(place, Place::Claimed(by) if *by == stream));
    }

    /// It is here. False when it is not what its name says.
    pub fn put(&self, digest: &str, bytes: Vec<u8>) -> bool {
        let good = proto::digest::of_bytes(&bytes) == digest;
        let mut places = self.lock();
        places.remove(digest);
        if !good {
            places.insert(digest.into(), Place::Bad);
            return false;
        }
        let held: usize =
            places.values().map(|place| if let Place::Here(bytes) = place { bytes.len() } else { 0 }).sum();
        if held + bytes.len() <= MOST_BYTES {
            places.insert(digest.into(), Place::Here(bytes.into()));
        }
        true
    }

    /// Drops what no engine names any more.
    pub fn keep(&self, wanted: impl Fn(&str) -> bool) {
        self.lock().retain(|digest, _| wanted(digest));
    }

    /// Number and bytes of those that are here.
    pub fn held(&self) -> (usize, usize) {
        let places = self.lock();
        places.values().fold((0, 0), |(n, bytes), place| match place {
            Place::Here(held) => (n + 1, bytes + held.len()),
            Place::Claimed(_) | Place::Bad => (n, bytes),
        })
    }

    /// The bundle of a model, by any of its served names.
    ///
    /// # Errors
    /// When no engine serves it, or there is none yet.
    pub fn get(&self, board: &Board, model: &str) -> Result<Bundle, NoBundle> {
        let short = || model.chars().take(128).collect::<String>();
        let mut state = NoBundle::NoModel(short());
        for seat in board.seats().iter() {
            let status = seat.status();
            if !status.models().iter().any(|name| name == model) {
                continue;
            }
            match self.lock().get(status.bundle()) {
                Some(Place::Here(bytes)) => return Ok(Bundle { digest: status.bundle().into(), bytes: bytes.clone() }),
                Some(Place::Claimed(_)) => state = NoBundle::Fetching(short()),
                Some(Place::Bad) | None if matches!(state, NoBundle::NoModel(_)) => state = NoBundle::NotYet(short()),
                Some(Place::Bad) | None => {}
            }
        }
        Err(state)
    }
}
