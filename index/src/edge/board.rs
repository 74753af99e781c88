//! What readers see of the fleet: put there by the writer, read without waiting.

use crate::answer::{Leases, Status};
use arc_swap::ArcSwap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The index's own clock: milliseconds since it started. Ages are counted on it alone.
#[derive(Debug, Clone, Copy)]
pub struct Clock(Instant);

impl Clock {
    /// Starts now.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Milliseconds since the start.
    pub fn now_ms(&self) -> u64 {
        self.0.elapsed().as_millis() as u64
    }
}

/// One engine's place on the board.
pub struct Seat {
    /// The engine's number in the table. Never that of another engine while this seat is on any reader's board: the
    /// fleet reuses numbers late.
    pub slot: u32,
    status: ArcSwap<Status>,
}

impl Seat {
    /// What is known of the engine now.
    pub fn status(&self) -> Arc<Status> {
        self.status.load_full()
    }

    /// Puts the engine's new status up.
    pub fn put(&self, status: Arc<Status>) {
        self.status.store(status);
    }
}

/// The whole fleet. The list is swapped when engines come and go; a seat's status at every message.
pub struct Board {
    seats: ArcSwap<Vec<Arc<Seat>>>,
    /// Raised with every change of the list.
    version: AtomicU64,
    /// After how long a silence an engine counts as what.
    pub leases: Leases,
    /// The clock of all ages.
    pub clock: Clock,
}

impl Board {
    /// A board with nobody on it.
    pub fn new(leases: Leases, clock: Clock) -> Self {
        Self { seats: ArcSwap::from_pointee(Vec::new()), version: AtomicU64::new(0), leases, clock }
    }

    /// Everybody, in the order of the fleet list.
    pub fn seats(&self) -> Arc<Vec<Arc<Seat>>> {
        self.seats.load_full()
    }

    /// Number of changes of the list so far.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The engine of this name.
    pub fn find(&self, engine: &str) -> Option<Arc<Seat>> {
        self.seats().iter().find(|seat| names(&seat.status(), engine)).cloned()
    }

    /// Replaces the list. Seats of engines that stay are taken over, so that readers of either list see the newest.
    pub fn replace(&self, statuses: impl Iterator<Item = Status>) {
        let before = self.seats();
        let seats = statuses.map(|status| match before.iter().find(|seat| seat.slot == status.slot) {
            Some(seat) => {
                seat.status.store(Arc::new(status));
                seat.clone()
            }
            None => Arc::new(Seat { slot: status.slot, status: ArcSwap::from_pointee(status) }),
        });
        self.seats.store(Arc::new(seats.collect()));
        self.version.fetch_add(1, Ordering::AcqRel);
    }
}

/// Is `name.rank` this engine? Without building the text.
pub fn names(status: &Status, engine: &str) -> bool {
    engine
        .strip_prefix(status.engine.name.as_str())
        .and_then(|rest| rest.strip_prefix('.'))
        .is_some_and(|rank| rank.parse() == Ok(status.engine.rank))
}
