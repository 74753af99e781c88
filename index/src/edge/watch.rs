//! Watchers of the fleet: the whole of it first, then what changes.

use super::board::Board;
use crate::answer::Update;
use std::sync::Arc;
use tokio::sync::broadcast;

/// Updates kept for a watcher that lags: 256 x 20 ms are 5 s. One that lags more is told the whole fleet again.
pub const MOST_BEHIND: usize = 256;

/// Where the writer tells updates and watchers take them.
#[derive(Clone)]
pub struct Hub {
    sender: broadcast::Sender<Arc<Update>>,
    board: Arc<Board>,
}

impl Hub {
    /// A hub without watchers.
    pub fn new(board: Arc<Board>) -> Self {
        Self { sender: broadcast::Sender::new(MOST_BEHIND), board }
    }

    /// Tells an update to all watchers.
    pub fn tell(&self, update: Update) {
        // Nobody watches: nobody is told.
        let _ = self.sender.send(Arc::new(update));
    }

    /// How many watch.
    pub fn watchers(&self) -> usize {
        self.sender.receiver_count()
    }

    /// A new watcher. Its first update is the whole fleet.
    pub fn watch(&self) -> Watch {
        // Subscribed before the whole is read: what changes in between is told twice, never missed.
        Watch { receiver: self.sender.subscribe(), board: self.board.clone(), whole: true, missed: 0 }
    }
}

/// One watcher.
pub struct Watch {
    receiver: broadcast::Receiver<Arc<Update>>,
    board: Arc<Board>,
    whole: bool,
    missed: u64,
}

impl Watch {
    /// The next update; `None` when the index stops.
    pub async fn next(&mut self) -> Option<Arc<Update>> {
        if !self.whole {
            match self.receiver.recv().await {
                Ok(update) => return Some(update),
                Err(broadcast::error::RecvError::Closed) => return None,
                Err(broadcast::error::RecvError::Lagged(missed)) => self.missed = missed,
            }
        }
        self.whole = false;
        let engines = self.board.seats().iter().map(|seat| seat.status()).collect();
        Some(Arc::new(Update { engines, whole: true, missed: std::mem::take(&mut self.missed), ..Update::default() }))
    }
}
