//! Snapshots: the whole set at one seq, in pieces of bounded size.

use crate::batch;
use crate::resident::Resident;
use proto::control::{Chain, Piece, Reply, SNAPSHOT_PIECE, encode};
use proto::event::{Fingerprints, Parent};
use proto::id::Epoch;
use proto::residency::Link;

/// Most cuts kept. A cut has about 8 bytes a block: 400 KB at 50,000 blocks.
pub const MAX_CUTS: usize = 2;
/// A cut that nobody asked for in this time is dropped, in milliseconds.
pub const KEPT_MS: u64 = 10_000;
/// What a chain weighs beside its fingerprints: its parent and its names, in fingerprints.
const CHAIN_WEIGHT: usize = 16;

#[derive(Debug)]
struct Cut {
    number: u64,
    next: u64,
    used_ms: u64,
    pieces: Vec<Vec<u8>>,
}

/// The cuts that are kept.
#[derive(Debug, Default)]
pub struct Cuts {
    cuts: Vec<Cut>,
    made: u64,
}

impl Cuts {
    /// How many were made.
    pub fn made(&self) -> u64 {
        self.made
    }

    /// Drops what nobody asked for in [`KEPT_MS`].
    pub fn expire(&mut self, now_ms: u64) {
        self.cuts.retain(|cut| now_ms.saturating_sub(cut.used_ms) < KEPT_MS);
    }

    /// Piece 0 of a cut after message `next - 1`. A cut at the same seq is used again.
    pub fn begin<'a>(
        &mut self,
        epoch: Epoch,
        next: u64,
        sets: &Resident,
        model: &str,
        adapter: impl Fn(u64) -> &'a str,
        now_ms: u64,
    ) -> Vec<u8> {
        if !self.cuts.iter().any(|cut| cut.next == next) {
            self.made += 1;
            let pieces = cut(self.made, epoch, next, sets, model, adapter);
            self.cuts.push(Cut { number: self.made, next, used_ms: now_ms, pieces });
            if self.cuts.len() > MAX_CUTS {
                self.cuts.remove(0);
            }
        }
        let number = self.cuts.iter().find(|cut| cut.next == next).map_or(0, |cut| cut.number);
        self.piece(number, 0, now_ms).unwrap_or_default()
    }

    /// An encoded piece of a cut; `None` when there is no such piece or cut.
    pub fn piece(&mut self, number: u64, piece: u32, now_ms: u64) -> Option<Vec<u8>> {
        let cut = self.cuts.iter_mut().find(|cut| cut.number == number)?;
        cut.used_ms = now_ms;
        cut.pieces.get(piece as usize).cloned()
    }
}

fn cut<'a>(
    number: u64,
    epoch: Epoch,
    next: u64,
    sets: &Resident,
    model: &str,
    adapter: impl Fn(u64) -> &'a str,
) -> Vec<Vec<u8>> {
    let (mut pieces, mut weight): (Vec<Vec<Chain>>, usize) = (vec![vec![]], 0);
    sets.chains(|kind, link, mut blocks| {
        let mut link = link;
        while !blocks.is_empty() {
            if weight + CHAIN_WEIGHT >= SNAPSHOT_PIECE {
                pieces.push(vec![]);
                weight = 0;
            }
            let (now, later) = blocks.split_at(blocks.len().min(SNAPSHOT_PIECE - CHAIN_WEIGHT - weight));
            weight += CHAIN_WEIGHT + now.len();
            let parent = match link {
                Some(link) => batch::parent(link, model, adapter(link.fingerprint())),
                None => Parent::Loose,
            };
            if let (Some(piece), Some(last)) = (pieces.last_mut(), now.last()) {
                piece.push(Chain { kind, parent, fingerprints: Fingerprints(now.to_vec()) });
                link = link.map(|_| Link::Block(*last));
            }
            blocks = later;
        }
    });
    let count = pieces.len() as u32;
    let digests: Vec<_> = sets.digests().collect();
    (0..)
        .zip(pieces)
        .map(|(piece, chains)| {
            let piece = Piece { cut: number, epoch, next, piece, pieces: count, digests: digests.clone(), chains };
            encode(&Reply::Snapshot(piece)).unwrap_or_default()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Plan;
    use crate::resident::Changes;
    use proto::control::decode;
    use std::collections::HashSet;

    #[test]
    fn pieces_are_bounded_and_have_parents_first() {
        let (mut sets, mut out) = (Resident::new(Plan::plain(16, [0, 32, 0])), Changes::default());
        for i in 0..30_000u64 {
            let parent = if i % 7 == 0 { Link::Root(1) } else { Link::Block(1 + i) };
            sets.add(0, i + 2, parent, false, &mut out);
        }
        let (_, digest) = sets.digests().next().expect("the gpu set");
        let mut cuts = Cuts::default();
        let epoch = Epoch { start_ms: 1, random: 2 };
        let (mut known, mut at, mut number) = (HashSet::new(), 0, None);
        loop {
            let bytes = match number {
                None => cuts.begin(epoch, 5, &sets, "m", |_| "", 0),
                Some(number) => cuts.piece(number, at, 0).unwrap_or_default(),
            };
            let Ok(Reply::Snapshot(piece)) = decode(&bytes) else { panic!("no piece {at}") };
            number = Some(piece.cut);
            assert_eq!((piece.piece, piece.next, piece.digests[0].1), (at, 5, digest));
            assert!(piece.chains.iter().map(|c| c.fingerprints.0.len()).sum::<usize>() <= SNAPSHOT_PIECE);
            for chain in piece.chains {
                match chain.parent {
                    Parent::Root { .. } | Parent::Loose => {}
                    Parent::Block(parent) => assert!(known.contains(&parent)),
                }
                known.extend(chain.fingerprints.0);
            }
            at += 1;
            if at == piece.pieces {
                break;
            }
        }
        assert_eq!(known.len() as u64, digest.count);
        assert_eq!(cuts.piece(1, at, 0), None);
        cuts.expire(KEPT_MS);
        assert_eq!(cuts.piece(1, 0, 0), None);
    }
}
