//! Time, and randomness.

use proto::id::Epoch;
use proto::proof::{NONCE_BYTES, Nonce};
use std::hash::{BuildHasher, Hasher};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A clock that never goes back, in milliseconds since it was made, and the time of day.
#[derive(Debug, Clone, Copy)]
pub struct Clock(Instant);

impl Clock {
    /// Starts at 0.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Milliseconds since the start.
    pub fn now_ms(&self) -> u64 {
        self.0.elapsed().as_millis() as u64
    }
}

/// Milliseconds since the Unix epoch, on this machine's clock.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

/// An epoch that begins now. The random bits come from the operating system, by way of the standard library's hasher
/// keys; the process id and the time are mixed in.
pub fn epoch() -> Epoch {
    let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.write_u64(unix_ms());
    hasher.write_u32(std::process::id());
    Epoch { start_ms: unix_ms(), random: hasher.finish() }
}

/// Random bytes of a connection, from the operating system.
///
/// # Errors
/// When the operating system has none.
pub fn nonce() -> std::io::Result<Nonce> {
    let mut bytes = [0; NONCE_BYTES];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(bytes)
}
