//! The last messages, kept for readers that lag or missed some. Bounded by bytes and by count.
//!
//! It is also what the publishing socket sends from: a reader is a position in this ring, so the memory of all readers
//! together is this ring, however many there are and however slow.

use std::collections::VecDeque;
use std::sync::Arc;

/// Most bytes kept.
pub const MAX_BYTES: usize = 4 << 20;
/// Most messages kept: with a heartbeat ten times a second and 50 steps a second, four minutes.
pub const MAX_MESSAGES: usize = 1 << 14;
/// What a kept message costs beyond its payload: the pointer, the counts before the payload, the allocator's own.
const OVERHEAD: usize = 64;

/// The ring.
#[derive(Debug, Default)]
pub struct Replay {
    messages: VecDeque<Arc<[u8]>>,
    oldest: u64,
    bytes: usize,
}

impl Replay {
    /// The oldest seq that is kept, or the next one when nothing is.
    pub fn oldest(&self) -> u64 {
        self.oldest
    }

    /// The seq of the next message.
    pub fn next(&self) -> u64 {
        self.oldest + self.messages.len() as u64
    }

    /// Keeps a message; the oldest ones go until it fits. The newest is always kept. Returns its seq.
    pub fn push(&mut self, payload: Vec<u8>) -> u64 {
        let seq = self.next();
        self.bytes += payload.len() + OVERHEAD;
        self.messages.push_back(payload.into());
        while self.messages.len() > 1 && (self.bytes > MAX_BYTES || self.messages.len() > MAX_MESSAGES) {
            if let Some(gone) = self.messages.pop_front() {
                self.bytes -= gone.len() + OVERHEAD;
                self.oldest += 1;
            }
        }
        seq
    }

    /// A message, while it is kept.
    pub fn get(&self, seq: u64) -> Option<&Arc<[u8]>> {
        self.messages.get(usize::try_from(seq.checked_sub(self.oldest)?).ok()?)
    }

    /// Payloads from `from` on: at most `count`, and no further one once `bytes` are reached.
    pub fn from(&self, from: u64, count: usize, bytes: usize) -> Vec<Vec<u8>> {
        let (mut out, mut total) = (Vec::new(), 0);
        for seq in from.. {
            let Some(payload) = self.get(seq).filter(|_| out.len() < count && total < bytes) else { break };
            total += payload.len();
            out.push(payload.to_vec());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_first_and_the_newest_stays() {
        let mut replay = Replay::default();
        for i in 0..100u64 {
            assert_eq!(replay.push(vec![i as u8; 100_000]), i);
        }
        assert_eq!((replay.oldest(), replay.next()), (100 - 41, 100));
        assert_eq!(replay.get(58), None);
        assert_eq!(replay.get(99).map(|p| p[0]), Some(99));
        assert_eq!(replay.from(90, 64, 250_000).len(), 3);
        assert_eq!(replay.from(98, 64, usize::MAX).len(), 2);
        assert_eq!(replay.from(100, 64, 1).len(), 0);
        replay.push(vec![0; MAX_BYTES + 1]);
        assert_eq!((replay.oldest(), replay.next()), (100, 101));
    }
}
