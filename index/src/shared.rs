//! The concurrent core: one [`Writer`], any number of [`Reader`]s, and what they share.
//!
//! The table says, for each fingerprint, which *holders* have it. A holder is one generation of one set of one
//! engine: [`Writer::open`] gives a hidden one, [`Writer::publish`] makes it that engine's live set of its kind and
//! retires the one before it in the same swap, so the arrival of a snapshot, a clear, a purge and a restart are each
//! one step to readers. What a retired holder leaves in the table is swept away by [`Writer::sweep`] in bounded steps.
//!
//! Promise of [`Reader::find`] beside a busy writer: a holder answered with depth `d` held block `d - 1` at some
//! instant of the lookup, and held block 0, and was live when the lookup began.

pub(crate) mod pins;
mod reader;
mod writer;

pub use reader::{Answer, Reader};
pub use writer::Writer;

use crate::sets::{Record, Sets};
use crate::table::{Directory, Table};
use pins::{Limbo, Pins, Published, Slab};
use proto::digest::Digest;
use proto::id::SetKind;
use std::sync::Arc;

/// What bounds a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Engine slots: numbers below this are accepted by [`Writer::open`].
    pub engines: u32,
    /// Holders that exist at once: live, hidden and not yet swept.
    pub holders: u32,
    /// Secret that spreads fingerprints over the table, drawn at start, so that who chooses fingerprints cannot
    /// choose where they fall.
    pub spread: u64,
}

impl Default for Limits {
    /// 4,096 engine slots; for each three kinds, a live, an arriving and a leaving generation.
    fn default() -> Self {
        Self { engines: 4096, holders: 4096 * 3 * 3, spread: 0 }
    }
}

/// A handle on one holder: one generation of one set of one engine. Handles of swept holders never become valid again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Holder {
    number: u32,
    generation: u32,
}

/// Whose set: what readers see of a holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Held {
    /// The engine slot given to [`Writer::open`].
    pub engine: u32,
    /// The kind given to [`Writer::open`].
    pub kind: SetKind,
}

/// What an operation did, in fingerprints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Changed {
    /// Membership bits that really changed.
    pub changed: u64,
    /// Stores of members, removals of absent ones, and the reserved fingerprint 0: nothing happened.
    pub unchanged: u64,
}

/// Why an operation was refused. Nothing has changed then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Every holder number is in use.
    #[error("all {limit} holders are in use; sweep retired ones, retire engines, or raise the limit")]
    NoHolderLeft {
        /// [`Limits::holders`].
        limit: u32,
    },
    /// The engine slot is beyond the limit.
    #[error("engine slot {engine} is beyond the limit of {limit}")]
    NoSuchEngine {
        /// What was asked for.
        engine: u32,
        /// [`Limits::engines`].
        limit: u32,
    },
    /// The holder was retired.
    #[error("holder {number} of generation {generation} was retired")]
    Retired {
        /// The holder's number.
        number: u32,
        /// The handle's generation.
        generation: u32,
    },
}

/// Counts and sizes of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Slots of the table.
    pub slots: u64,
    /// Slots with a fingerprint that some holder has.
    pub used: u64,
    /// Distinct holder sets.
    pub sets: u64,
    /// Remembered (set, holder) transitions, a fixed number of places.
    pub transitions: u64,
    /// Holders open: live and hidden.
    pub holders: u64,
    /// Holders retired and not yet swept or still visible to a reader.
    pub retired: u64,
    /// Bytes of the table.
    pub table_bytes: u64,
    /// Bytes of the sets.
    pub sets_bytes: u64,
    /// Bytes replaced but kept because a reader may still look at them.
    pub limbo_bytes: u64,
}

impl Stats {
    /// All bytes of the core.
    pub fn bytes(&self) -> u64 {
        self.table_bytes + self.sets_bytes + self.limbo_bytes
    }
}

/// What readers know of holders. Replaced as a whole whenever one is published or retired.
struct Map {
    /// Live holders of kind gpu and any: those that are bisected.
    closed: Box<[u64]>,
    /// All live holders.
    live: Box<[u64]>,
    /// By holder number; meaningless where not live.
    held: Box<[Held]>,
    /// By engine slot and kind: the number of the live holder, + 1; 0 for none. As long as the highest live engine
    /// slot asks for.
    of: Box<[[u32; SetKind::COUNT]]>,
}

/// What writer and readers share.
struct Core {
    pins: Arc<Pins>,
    map: Published<Map>,
    directory: Arc<Published<Directory>>,
    sets: Arc<Slab<Record>>,
}

/// A core with nobody in it: its writer and a first reader.
pub fn open(limits: Limits) -> (Writer, Reader) {
    let pins = Pins::new();
    let limbo = Limbo::new(&pins);
    let (table, sets) = (Table::new(limits.spread), Sets::new(&limbo));
    let core = Arc::new(Core {
        map: Published::new(Arc::new(Map::of(&[]))),
        directory: table.directory().clone(),
        sets: sets.slab().clone(),
        pins,
    });
    // Numbers below 2^30 leave room for what sets make of them.
    let limits = Limits { holders: limits.holders.min(1 << 30), ..limits };
    (Writer::new(core.clone(), limits, limbo, table, sets), Reader::new(&core))
}

/// What the writer knows of a holder number.
struct Entry {
    generation: u32,
    held: Held,
    state: State,
    digest: Digest,
    /// When it was retired.
    left: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Hidden,
    Live,
    Gone,
}

fn bit(mask: &mut [u64], number: usize) {
    if let Some(word) = mask.get_mut(number / 64) {
        *word |= 1 << (number % 64);
    }
}

impl Map {
    fn of(holders: &[Entry]) -> Map {
        let live = || holders.iter().enumerate().filter(|(_, entry)| entry.state == State::Live);
        let count = live().next_back().map_or(0, |(number, _)| number + 1);
        let engines = live().map(|(_, entry)| entry.held.engine as usize + 1).max().unwrap_or(0);
        let words = vec![0; count.div_ceil(64)];
        let mut map = Map {
            closed: words.clone().into(),
            live: words.into(),
            held: holders[..count].iter().map(|entry| entry.held).collect(),
            of: vec![[0; SetKind::COUNT]; engines].into(),
        };
        for (number, entry) in live() {
            bit(&mut map.live, number);
            if entry.held.kind.closed() {
                bit(&mut map.closed, number);
            }
            map.of[entry.held.engine as usize][entry.held.kind.index()] = number as u32 + 1;
        }
        map
    }

    fn bytes(&self) -> usize {
        size_of_val::<[Held]>(&self.held) + (self.closed.len() + self.live.len()) * 8 + size_of_val::<[_]>(&self.of)
    }
}
