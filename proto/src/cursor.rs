//! A receiver's place in one publisher's stream: is this message the next one?

use crate::id::Epoch;

/// What a message with an epoch and a seq means to a receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The next one: apply it. The cursor has moved.
    Contiguous,
    /// Messages `first..=last` are missing before this one. The cursor has not moved.
    Gap {
        /// First seq that is missing.
        first: u64,
        /// Last seq that is missing.
        last: u64,
    },
    /// Already seen: drop it.
    Stale,
    /// Another, later epoch: everything known of this engine is gone. The cursor has not moved; call
    /// [`Cursor::restart`] when the new epoch is accepted.
    Restarted,
    /// An epoch that is not later than the one followed: a second process under one name, or an old message.
    Foreign,
}

/// Place in one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cursor {
    epoch: Option<Epoch>,
    next: u64,
}

impl Cursor {
    /// A cursor that has seen everything of `epoch` before `next`.
    pub fn at(epoch: Epoch, next: u64) -> Self {
        Self { epoch: Some(epoch), next }
    }

    /// The epoch that is followed, if any.
    pub fn epoch(&self) -> Option<Epoch> {
        self.epoch
    }

    /// The seq that would be contiguous.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Judges one message, and moves on when it is the next one.
    pub fn step(&mut self, epoch: Epoch, seq: u64) -> Step {
        match self.epoch {
            None => Step::Restarted,
            Some(mine) if epoch > mine => Step::Restarted,
            Some(mine) if epoch < mine => Step::Foreign,
            Some(_) if seq == self.next => {
                self.next = self.next.saturating_add(1);
                Step::Contiguous
            }
            Some(_) if seq < self.next => Step::Stale,
            Some(_) => Step::Gap { first: self.next, last: seq - 1 },
        }
    }

    /// Follows `epoch` from `next` on. Never moves backwards within one epoch: a snapshot that is older than what was
    /// already applied must not make known messages look new.
    pub fn restart(&mut self, epoch: Epoch, next: u64) {
        let next = if self.epoch == Some(epoch) { next.max(self.next) } else { next };
        *self = Self::at(epoch, next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Epoch = Epoch { start_ms: 1, random: 1 };
    const B: Epoch = Epoch { start_ms: 2, random: 0 };

    #[test]
    fn follows_a_stream() {
        let mut cursor = Cursor::default();
        assert_eq!(cursor.step(A, 5), Step::Restarted);
        cursor.restart(A, 5);
        assert_eq!(cursor.step(A, 5), Step::Contiguous);
        assert_eq!(cursor.step(A, 5), Step::Stale);
        assert_eq!(cursor.step(A, 8), Step::Gap { first: 6, last: 7 });
        assert_eq!(cursor.step(A, 6), Step::Contiguous);
        assert_eq!(cursor.step(B, 0), Step::Restarted);
        cursor.restart(B, 0);
        assert_eq!(cursor.step(A, 7), Step::Foreign);
        assert_eq!(cursor.step(B, 0), Step::Contiguous);
    }

    #[test]
    fn a_snapshot_never_moves_it_back() {
        let mut cursor = Cursor::at(A, 10);
        cursor.restart(A, 4);
        assert_eq!(cursor.next(), 10);
        assert_eq!(cursor.step(A, u64::MAX), Step::Gap { first: 10, last: u64::MAX - 1 });
    }
}
