//! What each physical block holds, by block id: the engine's side of the truth.
//!
//! Its size is the pool's. Changes go into the ring in order; when the ring has no room (the publisher was starved for
//! hundreds of steps), the block is marked instead, at most once however often it changes, and its *present* content
//! is written when there is room again. So nothing overflows and nothing is lost: what was overwritten before it could
//! be told was not worth telling, since sets are published, not events.

use crate::record::Pen;
use proto::block::Fingerprint;
use proto::residency::Link;
use std::collections::HashMap;

/// A name under which a physical block can be hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// The name.
    pub fp: Fingerprint,
    /// What it follows, along the blocks of its group.
    pub parent: Link,
    /// Number of its adapter, 0 for none.
    pub adapter: u32,
    /// KV cache group.
    pub group: u16,
    /// It ends inside the block.
    pub partial: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Empty,
    // Cached, and its tokens cannot be named; no named prompt hits it.
    Unnamed,
    // As unnamed, but a named prompt may hit it: the agent missed what happened to it.
    Lost,
    Named(Key),
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    content: Content,
    // A slot of an older life is empty: a clear touches no slot.
    life: u32,
    marked: bool,
}

/// Most names of one block beyond its first: larger than any block has places to end at (blocks of Mamba models have
/// up to 1,000 tokens, their hashes 16). Blocks with more become nameless.
const MORE_KEYS: usize = 256;

/// The table.
#[derive(Debug)]
pub struct Slots {
    slots: Vec<Slot>,
    life: u32,
    // Further names of blocks that have several: only engines with partial hash hits have such.
    more: HashMap<u32, Vec<Key>>,
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
            more: HashMap::new(),
            marked: Vec::new(),
            clear_is_owed: false,
            lost: 0,
            scratch: Vec::new(),
        }
    }

    /// How many blocks the table is for.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Is it for none?
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
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
        if !self.more.is_empty() {
            self.more.remove(&block);
        }
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

    /// Blocks of a group got keys, each in place of what it had: a chain that begins after `parent`. Returns how many
    /// block ids were beyond the table.
    pub fn store(
        &mut self,
        pen: &mut Pen,
        group: u16,
        parent: Link,
        adapter: (u32, &str),
        chain: &[(u32, Fingerprint)],
    ) -> usize {
        let known = self.slots.len() as u32;
        if chain.iter().any(|(block, _)| *block >= known) {
            return chain.len();
        }
        let mut before = parent;
        for (block, fp) in chain {
            let key = Key { fp: *fp, parent: before, adapter: adapter.0, group, partial: false };
            self.set(*block, Content::Named(key));
            before = Link::Block(*fp);
        }
        if self.owes() || !pen.stored(u32::from(group), parent, adapter.1, chain.iter().copied()) {
            chain.iter().for_each(|(block, _)| self.mark(*block));
        }
        0
    }

    /// A block got one more key. False when its id is beyond the table.
    pub fn add(&mut self, pen: &mut Pen, block: u32, key: Key, adapter: &str) -> bool {
        match self.get(block) {
            None => return false,
            Some(Content::Empty) => self.set(block, Content::Named(key)),
            Some(Content::Named(first)) => {
                let more = self.more.get(&block).map_or(&[][..], Vec::as_slice);
                if first == key || more.contains(&key) {
                    return true;
                }
                if more.len() >= MORE_KEYS {
                    return self.store_unnamed(pen, block, true);
                }
                self.more.entry(block).or_default().push(key);
            }
            // What else it holds has no name, so that it cannot be told alone.
            Some(Content::Unnamed | Content::Lost) => return true,
        }
        if self.owes() || !pen.added(&key, adapter, block) {
            self.mark(block);
        }
        true
    }

    /// What one block had, another has now.
    pub fn moved(&mut self, pen: &mut Pen, from: u32, to: u32) {
        let Some(content) = self.get(from) else { return };
        let more = self.more.remove(&from);
        self.set(from, Content::Empty);
        self.set(to, content);
        if let Some(more) = more {
            self.more.insert(to, more);
        }
        if self.owes() || !pen.moved(from, to) {
            self.mark(from);
            self.mark(to);
        }
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
        self.more.clear();
        for block in self.marked.drain(..) {
            self.slots[block as usize].marked = false;
        }
        self.clear_is_owed = !pen.cleared();
    }

    /// The blocks that hold something, named or not.
    pub fn held(&self) -> Vec<u32> {
        let blocks = 0..self.slots.len() as u32;
        blocks.filter(|block| !matches!(self.get(*block), None | Some(Content::Empty))).collect()
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
                Some(Content::Named(first)) => {
                    // What was told of it before is replaced, so that telling it twice does no harm.
                    let more = self.more.get(&block).map_or(&[][..], Vec::as_slice);
                    pen.evicted(&[block])
                        && [first].iter().chain(more).all(|key| pen.added(key, adapter(key.adapter), block))
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
