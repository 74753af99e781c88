//! Numbers that the engine's thread and the publisher's share.

use crate::facts::Counts;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Numbers that both threads see. Each is written by one side; the latest value counts.
#[derive(Debug, Default)]
pub struct Gauges {
    pub(super) running: AtomicU32,
    pub(super) waiting: AtomicU32,
    pub(super) backlog_tokens: AtomicU64,
    pub(super) kv_use: AtomicU32,
    pub(super) steps: AtomicU64,
    pub(super) faults: AtomicU64,
    pub(super) untold: AtomicU64,
    pub(super) unknown_below: AtomicU64,
    pub(super) unknown_media: AtomicU64,
    pub(super) asleep: AtomicBool,
    pub(super) draining: AtomicBool,
    pub(super) owes: AtomicBool,
    /// Written by the publisher: the last seq that it published.
    pub published: AtomicU64,
}

impl Gauges {
    /// The engine's last counts.
    pub fn counts(&self) -> Counts {
        Counts {
            running: self.running.load(Ordering::Relaxed),
            waiting: self.waiting.load(Ordering::Relaxed),
            backlog_tokens: self.backlog_tokens.load(Ordering::Relaxed),
            kv_use: f32::from_bits(self.kv_use.load(Ordering::Relaxed)),
        }
    }

    /// Steps since the start.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Does the engine sleep?
    pub fn asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }

    /// Does the engine take no new requests?
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Did the ring have no room for something that is to be told yet?
    pub fn owes(&self) -> bool {
        self.owes.load(Ordering::Relaxed)
    }

    /// Faults caught on the engine's thread.
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    /// Steps in the lives of requests that found no room.
    pub fn untold(&self) -> u64 {
        self.untold.load(Ordering::Relaxed)
    }

    /// Reports of tiers below about blocks that are not known, and about media that are not known.
    pub fn unknown(&self) -> (u64, u64) {
        (self.unknown_below.load(Ordering::Relaxed), self.unknown_media.load(Ordering::Relaxed))
    }

    /// A report of a medium that is not known.
    pub fn unknown_medium(&self) {
        self.unknown_media.fetch_add(1, Ordering::Relaxed);
    }

    /// One more fault.
    pub fn fault(&self) {
        self.faults.fetch_add(1, Ordering::Relaxed);
    }
}
