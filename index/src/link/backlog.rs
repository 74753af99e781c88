//! Messages that arrived before their turn: beyond a gap, or beside a snapshot. Bounded.

use proto::event::Batch;
use std::collections::BTreeMap;

/// Most messages kept: an engine sends about 30 a second (20 steps, 10 heartbeats), so half a minute of them.
pub const MOST_MESSAGES: usize = 1024;
/// Most payload bytes kept besides one message: 1,024 engines that all wait and all write large batches take 8 GiB
/// at the very most; a usual batch is below 10 KiB.
pub const MOST_BYTES: usize = 8 << 20;

/// What became of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// It is kept.
    New,
    /// One of its seq was kept already.
    Known,
    /// There is no room; it was not kept.
    Full,
}

/// Messages by seq: an agent's, or a stock engine's.
#[derive(Debug)]
pub struct Backlog<M = Batch> {
    messages: BTreeMap<u64, (M, usize)>,
    bytes: usize,
}

impl<M> Default for Backlog<M> {
    fn default() -> Self {
        Self { messages: BTreeMap::new(), bytes: 0 }
    }
}

impl<M> Backlog<M> {
    /// Keeps a message of so many payload bytes.
    pub fn keep(&mut self, seq: u64, batch: M, bytes: usize) -> Kept {
        if self.messages.contains_key(&seq) {
            return Kept::Known;
        }
        // The first message always fits: one payload is bounded on its own.
        if self.messages.len() >= MOST_MESSAGES || (!self.messages.is_empty() && self.bytes + bytes > MOST_BYTES) {
            return Kept::Full;
        }
        self.bytes += bytes;
        self.messages.insert(seq, (batch, bytes));
        Kept::New
    }

    /// Takes the message of this seq, and forgets all before it.
    pub fn take(&mut self, seq: u64) -> Option<M> {
        while let Some(entry) = self.messages.first_entry().filter(|entry| *entry.key() < seq) {
            self.bytes -= entry.remove().1;
        }
        let (batch, bytes) = self.messages.remove(&seq)?;
        self.bytes -= bytes;
        Some(batch)
    }

    /// All messages from this seq on, in order.
    pub fn from(&self, seq: u64) -> impl Iterator<Item = (u64, &M)> {
        self.messages.range(seq..).map(|(seq, (batch, _))| (*seq, batch))
    }

    /// The lowest seq that is kept.
    pub fn first(&self) -> Option<u64> {
        self.messages.first_key_value().map(|(seq, _)| *seq)
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::id::Epoch;

    fn batch() -> Batch {
        Batch { version: 1, epoch: Epoch::default(), step_ms: 0, ops: vec![] }
    }

    #[test]
    fn it_is_bounded_in_messages_and_bytes() {
        let mut backlog = Backlog::default();
        assert_eq!(backlog.keep(9, batch(), 3 * MOST_BYTES), Kept::New);
        assert_eq!(backlog.keep(9, batch(), 1), Kept::Known);
        assert_eq!(backlog.keep(10, batch(), 1), Kept::Full);
        assert!(backlog.take(9).is_some());
        for seq in 0..MOST_MESSAGES as u64 {
            assert_eq!(backlog.keep(seq, batch(), 1), Kept::New);
        }
        assert_eq!(backlog.keep(5000, batch(), 1), Kept::Full);
        assert!(backlog.take(1000).is_some());
        assert_eq!((backlog.first(), backlog.bytes), (Some(1001), 23));
    }
}
