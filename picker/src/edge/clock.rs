//! Time and chance.

use std::time::{Instant, SystemTime, UNIX_EPOCH};
use uuid::Uuid;

/// A steady clock that started with the picker.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    /// Starts it.
    pub fn start() -> Clock {
        Clock { start: Instant::now() }
    }

    /// Milliseconds since the start.
    pub fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// Milliseconds since the Unix epoch, for people and templates.
    pub fn wall_ms(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
    }
}

/// A new request id: UUID v4, as a number and as text. Its low bits also decide by lot.
pub fn request_id() -> (u128, String) {
    let id = Uuid::new_v4();
    (id.as_u128(), id.to_string())
}
