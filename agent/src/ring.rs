//! The one thing that both threads touch: a bounded ring of 64-bit words with one writer and one reader.
//!
//! A record is one header word and its payload, written as a whole or not at all: the writer never waits, it is told
//! that there is no room. All words are atomics, so there is no `unsafe` here; the two positions order them: the
//! writer publishes words by a release store of `written`, the reader frees them by a release store of `read`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Smallest ring: 65,536 words, 512 KiB.
pub const MIN_WORDS: usize = 1 << 16;
/// Largest ring: 524,288 words, 4 MiB. A step of 8,192 prompt tokens writes about 1,500 words, so this is what an
/// engine does in hundreds of steps; beyond it the slot table takes over, and nothing is lost.
pub const MAX_WORDS: usize = 1 << 19;

#[derive(Debug)]
struct Shared {
    words: Box<[AtomicU64]>,
    // Positions only grow; a word's place is its position modulo the length, a power of two.
    written: AtomicU64,
    read: AtomicU64,
}

/// The engine's end.
#[derive(Debug)]
pub struct Writer {
    shared: Arc<Shared>,
    written: u64,
    read: u64,
}

/// The publisher's end.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    read: u64,
}

/// A ring for a pool of `blocks` blocks: four words a block, within [`MIN_WORDS`] and [`MAX_WORDS`].
pub fn for_pool(blocks: usize) -> (Writer, Reader) {
    ring(blocks.saturating_mul(4))
}

/// A ring of at least `words` words, within the limits.
pub fn ring(words: usize) -> (Writer, Reader) {
    with_words(words.clamp(MIN_WORDS, MAX_WORDS))
}

fn with_words(words: usize) -> (Writer, Reader) {
    let shared = Arc::new(Shared {
        words: (0..words.next_power_of_two()).map(|_| AtomicU64::new(0)).collect(),
        written: AtomicU64::new(0),
        read: AtomicU64::new(0),
    });
    (Writer { shared: shared.clone(), written: 0, read: 0 }, Reader { shared, read: 0 })
}

impl Shared {
    fn at(&self, position: u64) -> &AtomicU64 {
        &self.words[position as usize & (self.words.len() - 1)]
    }
}

impl Writer {
    /// Longest record taken, in words with its header: a quarter of the ring, so that one long record cannot fill it.
    pub fn longest(&self) -> usize {
        self.shared.words.len() / 4
    }

    /// Writes a record: `header`'s low 8 bits, and `payload`. False when there is no room; then nothing was written.
    pub fn push(&mut self, kind: u8, payload: &[u64]) -> bool {
        let length = payload.len() as u64 + 1;
        if length as usize > self.longest() {
            return false;
        }
        let capacity = self.shared.words.len() as u64;
        if self.written - self.read + length > capacity {
            self.read = self.shared.read.load(Ordering::Acquire);
            if self.written - self.read + length > capacity {
                return false;
            }
        }
        self.shared.at(self.written).store(u64::from(kind) | ((payload.len() as u64) << 8), Ordering::Relaxed);
        for (position, word) in (self.written + 1..).zip(payload) {
            self.shared.at(position).store(*word, Ordering::Relaxed);
        }
        self.written += length;
        self.shared.written.store(self.written, Ordering::Release);
        true
    }
}

impl Reader {
    /// Takes the next record: its kind, and its payload in `out` (overwritten). `None` when there is none.
    pub fn pop(&mut self, out: &mut Vec<u64>) -> Option<u8> {
        let written = self.shared.written.load(Ordering::Acquire);
        if self.read == written {
            return None;
        }
        let header = self.shared.at(self.read).load(Ordering::Relaxed);
        let end = self.read + 1 + (header >> 8);
        out.clear();
        out.extend((self.read + 1..end).map(|position| self.shared.at(position).load(Ordering::Relaxed)));
        self.read = end;
        self.shared.read.store(end, Ordering::Release);
        Some(header as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_ring_refuses_and_goes_on_when_read() {
        let (mut writer, mut reader) = with_words(16);
        let mut out = vec![];
        for round in 0..10u64 {
            assert!(writer.push(1, &[round, round, round]));
            assert!(writer.push(2, &[]));
            assert!(writer.push(1, &[7; 3]));
            assert!(writer.push(3, &[8; 3]));
            assert!(!writer.push(4, &[9; 3]), "16 words hold 4 + 1 + 4 + 4 and 3 more");
            assert!(!writer.push(4, &[9; 4]), "longer than a quarter");
            assert_eq!((reader.pop(&mut out), &out[..]), (Some(1), &[round; 3][..]));
            assert_eq!((reader.pop(&mut out), &out[..]), (Some(2), &[][..]));
            assert_eq!((reader.pop(&mut out), &out[..]), (Some(1), &[7; 3][..]));
            assert_eq!((reader.pop(&mut out), &out[..]), (Some(3), &[8; 3][..]));
            assert_eq!(reader.pop(&mut out), None);
        }
    }

    #[test]
    fn two_threads_see_every_record_once_and_whole() {
        let (mut writer, mut reader) = with_words(64);
        let writing = std::thread::spawn(move || {
            for i in 0..200_000u64 {
                let payload = vec![i; (i % 13) as usize];
                while !writer.push((i % 250) as u8, &payload) {
                    std::thread::yield_now();
                }
            }
        });
        let mut out = vec![];
        for i in 0..200_000u64 {
            let kind = loop {
                match reader.pop(&mut out) {
                    Some(kind) => break kind,
                    None => std::thread::yield_now(),
                }
            };
            assert_eq!((kind, out.len()), ((i % 250) as u8, (i % 13) as usize));
            assert!(out.iter().all(|word| *word == i), "record {i} is torn: {out:?}");
        }
        assert!(writing.join().is_ok());
    }
}
