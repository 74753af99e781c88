//! Sets built beside the live ones from an agent's snapshot.

use crate::shared::{Holder, Refused, Writer};
use proto::control::{Chain, Piece};
use proto::event::{Batch, Op};
use proto::id::SetKind;

/// Most pieces that a snapshot may claim: 2^14 pieces x 8,192 fingerprints are 134 million members.
pub const MOST_PIECES: u32 = 1 << 14;

/// What a piece of a snapshot meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Ask for this piece of this cut next.
    Next(u64, u32),
    /// That was the last one and the digests agree: the hidden holders are the sets before this seq.
    Whole(u64),
    /// The piece does not belong to this cut, or the digests differ: begin again.
    Broken,
}

/// The cut that is being read.
#[derive(Debug, Clone, Copy)]
struct Cut {
    cut: u64,
    next: u64,
    pieces: u32,
    /// The piece that comes next.
    expect: u32,
}

/// A snapshot under way.
#[derive(Debug)]
pub struct Rebuild {
    /// Kinds that are built.
    pub kinds: [bool; SetKind::COUNT],
    /// Are messages held back until it is there? Otherwise they go on being applied to the live sets.
    pub full: bool,
    /// The ask that is out, and when it was sent.
    pub asked: Option<(u64, u64)>,
    /// When to ask, while none is out.
    pub ask_at_ms: u64,
    /// For a rebuild beside a live stream: every message applied since the ask is kept, from this seq on.
    pub tail_from: u64,
    hidden: [Option<Holder>; SetKind::COUNT],
    cut: Option<Cut>,
}

impl Rebuild {
    /// Begins: nothing is asked yet.
    pub fn new(kinds: [bool; SetKind::COUNT], full: bool, tail_from: u64, ask_at_ms: u64) -> Self {
        Self { kinds, full, asked: None, ask_at_ms, tail_from, hidden: [None; SetKind::COUNT], cut: None }
    }

    /// Gives up: what was built is retired.
    pub fn abandon(&mut self, core: &mut Writer) -> Result<(), Refused> {
        self.cut = None;
        let outcomes = self.hidden.each_mut().map(|hidden| hidden.take().map_or(Ok(()), |holder| core.retire(holder)));
        outcomes.into_iter().collect()
    }

    /// Takes one piece.
    pub fn piece(&mut self, core: &mut Writer, slot: u32, piece: Piece) -> Result<Progress, Refused> {
        let cut = match self.cut {
            None if piece.piece == 0 && (1..=MOST_PIECES).contains(&piece.pieces) => {
                Cut { cut: piece.cut, next: piece.next, pieces: piece.pieces, expect: 0 }
            }
            Some(cut)
                if (cut.cut, cut.next, cut.pieces, cut.expect)
                    == (piece.cut, piece.next, piece.pieces, piece.piece) =>
            {
                cut
            }
            _ => return Ok(Progress::Broken),
        };
        for chain in &piece.chains {
            if self.kinds[chain.kind.index()] {
                self.store(core, slot, chain)?;
            }
        }
        let expect = cut.expect + 1;
        self.cut = Some(Cut { expect, ..cut });
        if expect < cut.pieces {
            return Ok(Progress::Next(cut.cut, expect));
        }
        for kind in SetKind::ALL {
            let told = piece.digests.iter().find(|(of, _)| *of == kind).map(|(_, digest)| *digest).unwrap_or_default();
            let built = match self.hidden[kind.index()] {
                Some(holder) => core.digest(holder)?,
                None => Default::default(),
            };
            if self.kinds[kind.index()] && told != built {
                return Ok(Progress::Broken);
            }
        }
        Ok(Progress::Whole(cut.next))
    }

    fn store(&mut self, core: &mut Writer, slot: u32, chain: &Chain) -> Result<(), Refused> {
        let holder = self.holder(core, slot, chain.kind)?;
        core.store(holder, &chain.fingerprints.0)?;
        Ok(())
    }

    fn holder(&mut self, core: &mut Writer, slot: u32, kind: SetKind) -> Result<Holder, Refused> {
        let place = &mut self.hidden[kind.index()];
        match *place {
            Some(holder) => Ok(holder),
            None => {
                let holder = core.open(slot, kind)?;
                *place = Some(holder);
                Ok(holder)
            }
        }
    }

    /// Applies what a message did since the cut to the hidden holders.
    pub fn follow(&mut self, core: &mut Writer, slot: u32, batch: &Batch) -> Result<(), Refused> {
        for op in &batch.ops {
            match op {
                Op::Store(store) if self.kinds[store.kind.index()] => {
                    let holder = self.holder(core, slot, store.kind)?;
                    core.store(holder, &store.fingerprints.0)?;
                }
                Op::Remove(remove) => {
                    if let Some(holder) = self.hidden[remove.kind.index()] {
                        core.remove(holder, &remove.fingerprints.0)?;
                    }
                }
                Op::Clear(clear) => {
                    for kind in SetKind::ALL {
                        if clear.kind.is_none_or(|one| one == kind)
                            && let Some(holder) = self.hidden[kind.index()].take()
                        {
                            core.retire(holder)?;
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Makes what was built the live sets of its kinds.
    pub fn publish(&mut self, core: &mut Writer, live: &mut [Option<Holder>; SetKind::COUNT]) -> Result<(), Refused> {
        for kind in SetKind::ALL.into_iter().filter(|kind| self.kinds[kind.index()]) {
            let at = kind.index();
            let before = live[at].take();
            match (self.hidden[at].take(), before) {
                (Some(holder), _) => {
                    core.publish(holder)?;
                    live[at] = Some(holder);
                }
                (None, Some(before)) => core.retire(before)?,
                (None, None) => {}
            }
        }
        Ok(())
    }
}
