//! What each physical block holds, by block id: the engine's side of the truth.
//!
//! Its size is the pool's. Changes go into the ring in order; when the ring has no room (the publisher was starved for
//! hundreds of steps), the block is marked instead, at most once however often it changes, and its *present* content
//! is written when there is room again. So nothing overflows and nothing is lost: what was overwritten before it could
//! be told was not worth telling, since sets are published, not events.

use crate::record::Pen;
use proto::block::Fingerprint;
use proto::residency::Link;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Empty,
    // Cached, and its tokens cannot be named; no named prompt hits it.
    Unnamed,
    // As unnamed, but a named prompt may hit it: the agent missed what happened to it.
    Lost,
    Named { fp: Fingerprint, parent: Link, adapter: u32 },
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    content: Content,
    // A slot of an older life is empty: a clear touches no slot.
    life: u32,
    marked: bool,
}

/// The table.
#[derive(Debug)]
pub struct Slots {
    slots: Vec<Slot>,
    life: u32,
    // Blocks whose content is to be told when there is room: at most one entry a slot.
    marked: Vec<u32>,
    clear_is_owed: bool,
    lost: usize,
    scratch: Vec<u32>,
}

impl Slots {
    /// A table for block ids below `blocks`.
    pub fn new(blocks: usize) -> Self {
        Self {
            slots: vec![Slot { content: Content::Empty, life: 0, marked: false }; blocks],
            life: 0,
            marked: Vec::new(),
            clear_is_owed: false,
            lost: 0,
            scratch: Vec::new(),
        }
    }

    /// Is something owed to the publisher? Then the order is lost, and lookups cannot be predicted.
    pub fn owes(&self) -> bool {
        self.clear_is_owed || !self.marked.is_empty()
    }

    fn get(&self, block: u32) -> Option<Content> {
        let slot = self.slots.get(block as usize)?;
        Some(if slot.life == self.life { slot.content } else { Content::Empty })
    }

    /// How many blocks hold something that a prompt may hit and that the agent cannot name.
    pub fn lost(&self) -> usize {
        self.lost
    }

    /// Is this block one of them?
    pub fn is_lost(&self, block: u32) -> bool {
        self.get(block) == Some(Content::Lost)
    }

    fn set(&mut self, block: u32, content: Content) {
        self.lost += usize::from(content == Content::Lost);
        self.lost -= usize::from(self.is_lost(block));
        let life = self.life;
        if let Some(slot) = self.slots.get_mut(block as usize) {
            (slot.content, slot.life) = (content, life);
        }
    }

    fn mark(&mut self, block: u32) {
        if let Some(slot) = self.slots.get_mut(block as usize)
            && !slot.marked
        {
            slot.marked = true;
            self.marked.push(block);
        }
    }

    /// Blocks got keys: a chain that begins after `parent`. Returns how many block ids were beyond the table.
    pub fn store(&mut self, pen: &mut Pen, parent: Link, adapter: (u32, &str), chain: &[(u32, Fingerprint)]) -> usize {
        let known = self.slots.len() as u32;
        if chain.iter().any(|(block, _)| *block >= known) {
            return chain.len();
        }
        let mut before = parent;
        for (block, fp) in chain {
            self.set(*block, Content::Named { fp: *fp, parent: before, adapter: adapter.0 });
            before = Link::Block(*fp);
        }
        if self.owes() || !pen.stored(parent, adapter.1, chain.iter().copied()) {
            chain.iter().for_each(|(block, _)| self.mark(*block));
        }
        0
    }

    /// A block got a key whose tokens have no name; `lost` says that a named prompt may hit it all the same. False
    /// when its id is beyond the table.
    pub fn store_unnamed(&mut self, pen: &mut Pen, block: u32, lost: bool) -> bool {
        if block as usize >= self.slots.len() {
            return false;
        }
        self.set(block, if lost { Content::Lost } else { Content::Unnamed });
        if self.owes() || !pen.unnamed(&[block]) {
            self.mark(block);
        }
        true
    }

    /// Blocks have no key any more, if they had one.
    pub fn evict(&mut self, pen: &mut Pen, blocks: impl Iterator<Item = u32>) {
        let mut gone = std::mem::take(&mut self.scratch);
        gone.clear();
        gone.extend(blocks.filter(|block| !matches!(self.get(*block), None | Some(Content::Empty))));
        if !gone.is_empty() {
            gone.iter().for_each(|block| self.set(*block, Content::Empty));
            if self.owes() || !pen.evicted(&gone) {
                gone.iter().for_each(|block| self.mark(*block));
            }
        }
        self.scratch = gone;
    }

    /// No block has a key any more.
    pub fn clear(&mut self, pen: &mut Pen) {
        self.life = self.life.wrapping_add(1);
        self.lost = 0;
        for block in self.marked.drain(..) {
            self.slots[block as usize].marked = false;
        }
        self.clear_is_owed = !pen.cleared();
    }

    /// Tells what is owed, as far as there is room. `adapter` gives the name of an adapter's number.
    pub fn settle<'a>(&mut self, pen: &mut Pen, adapter: impl Fn(u32) -> &'a str) {
        if self.clear_is_owed {
            self.clear_is_owed = !pen.cleared();
        }
        while !self.clear_is_owed
            && let Some(block) = self.marked.last().copied()
        {
            let told = match self.get(block) {
                None | Some(Content::Empty) => pen.evicted(&[block]),
                Some(Content::Unnamed | Content::Lost) => pen.unnamed(&[block]),
                Some(Content::Named { fp, parent, adapter: number }) => {
                    pen.stored(parent, adapter(number), [(block, fp)].into_iter())
                }
            };
            if !told {
                return;
            }
            self.marked.pop();
            self.slots[block as usize].marked = false;
        }
    }
}
