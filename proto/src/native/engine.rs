//! One stock engine: its events in, changes of the closed GPU set out.
//!
//! The engine's hash of a block leads to our fingerprint by hashing its token ids again. A block whose parent is not
//! known is parked with its tokens and named when the parent is; nothing is ever named after a guessed parent. Blocks
//! that cannot be named for certain are remembered without a name, so that their removal is understood.
//!
//! What the stream does not tell, and what is done about it:
//!
//! * *Copies.* A store is one more copy, a removal one less; [`Residency`] counts them. From vLLM 0.26 any client can
//!   ask for a repeated announcement of the cached prefix (`kv_cache_report_mode=full`), which is no copy. It has no
//!   mark of its own, but always starts at the first block, so in map events that start a prompt a block which is
//!   already there is *not* counted again. That is wrong for a request that recomputes a cached first block (a prompt
//!   of exactly one block, or with prompt logprobs): then the first of two evictions takes the credit away, and the
//!   second is an unknown removal. Credit is lost, never invented.
//! * *Salts and images before vLLM 0.17*, and in SGLang: such blocks look like plain ones, but have another engine
//!   hash. The first hash that claims a fingerprint keeps it; another one is [`Counters::hidden`] and has no name.
//! * *Groups.* Only one full-attention group feeds the set. Where groups are told without their kinds (vLLM 0.20,
//!   0.21 with a hybrid model) nothing can be credited: see [`NativeEngine::blind`].
//! * *Other tiers* of this machine make the *any* set, see [`lower`]; what is on another machine is counted only. A
//!   connector that announces only the last of several blocks (a `block_size_factor`) credits that one alone.

pub mod lower;
mod place;

use super::counters::Counters;
use super::dialect::{Adapter, EngineHash, Event, EventBatch, Extras, GroupKind, Key, Medium, Removed, Stored};
use crate::block::Fingerprint;
use crate::residency::{Change, FingerprintMap, Residency};
use lower::{Lower, Tier};
use std::collections::HashSet;

/// Largest block, in tokens: hybrid models have had some 1,000, so this is no real engine's limit.
pub const MAX_BLOCK_SIZE: u32 = 1 << 16;

/// What bounds one engine's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most blocks kept, named or not. The default, 2^20, is 16 Mi tokens of 16-token blocks, some 20 times what one
    /// GPU holds; at about 120 bytes a block (a name here, a node and a map entry in [`Residency`]) 120 MiB.
    pub blocks: usize,
    /// Most token ids parked. The default, 2^22, is 16 MiB; parking is for a late start, when every conversation that
    /// goes on hangs on blocks announced before.
    pub parked_tokens: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { blocks: 1 << 20, parked_tokens: 1 << 22 }
    }
}

#[derive(Debug, Clone)]
struct Parked {
    parent: EngineHash,
    adapter: Adapter,
    tokens: Vec<u32>,
    keys: Vec<Key>,
}

#[derive(Debug, Clone)]
enum Name {
    Known(Fingerprint),
    Parked(Box<Parked>),
    Without,
}

#[derive(Debug, Clone)]
struct Block {
    /// On the GPU.
    copies: u32,
    /// Below it.
    lower: u32,
    name: Name,
}

/// The state of one stock engine.
#[derive(Debug, Clone, Default)]
pub struct NativeEngine {
    model: String,
    seed: u64,
    limits: Limits,
    group: Option<u32>,
    block_size: Option<u32>,
    blind: bool,
    lookahead: bool,
    blocks: FingerprintMap<Block>,
    /// Parked blocks by the hash that they wait for.
    waiting: FingerprintMap<HashSet<EngineHash>>,
    parked_tokens: usize,
    residency: Residency,
    lower: Option<Box<Lower>>,
    now_ms: u64,
    /// Groups of other kinds were announced.
    mixed: bool,
    counters: Counters,
}

impl NativeEngine {
    /// An engine of which nothing is known. `model` is the namespace's model, `seed` the deployment's.
    pub fn new(model: impl Into<String>, seed: u64, limits: Limits) -> Self {
        Self { model: model.into(), seed, limits, ..Self::default() }
    }

    /// Applies one batch. `changes` is emptied first and then holds the changes of the set, in order, each keeping it
    /// prefix-closed. True when the set was emptied at once before them.
    pub fn apply(&mut self, batch: EventBatch, changes: &mut Vec<Change>) -> bool {
        changes.clear();
        let mut cleared = false;
        self.counters.unknown_event += batch.unknown;
        self.counters.unreadable_event += batch.unreadable;
        for event in batch.events {
            let cleared_here = match event {
                Event::Stored(stored) => self.stored(*stored, changes),
                Event::Removed(removed) => {
                    self.removed(&removed, changes);
                    false
                }
                Event::Cleared(None) => {
                    self.counters.cleared += 1;
                    self.forget();
                    true
                }
                Event::Cleared(Some(medium)) => {
                    self.counters.cleared += 1;
                    self.clear_tier(medium, changes);
                    false
                }
            };
            if cleared_here {
                // What the set held before does not matter any more.
                changes.clear();
                cleared = true;
            }
        }
        self.bury();
        cleared
    }

    /// Forgets every block, as after a restart of the engine or a gap that no replay closes. Group and block size are
    /// learned anew; counters stay.
    pub fn restart(&mut self) {
        self.forget();
        (self.group, self.block_size) = (None, None);
        (self.blind, self.lookahead, self.mixed) = (false, false, false);
    }

    fn forget(&mut self) {
        self.blocks = FingerprintMap::default();
        self.waiting = FingerprintMap::default();
        self.parked_tokens = 0;
        self.residency.clear();
        self.forget_lower();
    }

    /// The reachable set, with its digest.
    pub fn residency(&self) -> &Residency {
        &self.residency
    }

    /// Token ids in a block, once an event said so.
    pub fn block_size(&self) -> Option<u32> {
        self.block_size
    }

    /// The engine has several groups and does not say of which kinds: nothing is credited until it restarts.
    pub fn blind(&self) -> bool {
        self.blind
    }

    /// Hashes cover tokens after the block: such an engine's hits are shorter than its set says.
    pub fn lookahead(&self) -> bool {
        self.lookahead
    }

    /// The engine has window or state groups too: its hits may end before the set does.
    pub fn mixed(&self) -> bool {
        self.mixed
    }

    /// Blocks kept without a name, parked ones included.
    pub fn unnamed(&self) -> usize {
        self.blocks.values().filter(|block| !matches!(block.name, Name::Known(_))).count()
    }

    /// Token ids parked.
    pub fn parked_tokens(&self) -> usize {
        self.parked_tokens
    }

    /// What happened so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The tier of a copy in this place, where it belongs to a set that is kept.
    fn tier(&mut self, medium: Medium, remote: bool) -> Option<Tier> {
        let tier = Tier::of(medium);
        match tier {
            _ if remote => self.counters.other_machine += 1,
            None => self.counters.unknown_medium += 1,
            Some(_) => return tier,
        }
        None
    }

    /// Applies a store event. True when it showed that the set so far may not be credited.
    fn stored(&mut self, event: Stored, changes: &mut Vec<Change>) -> bool {
        let Some(tier) = self.tier(event.medium, event.remote) else { return false };
        match event.kind {
            Some(GroupKind::Full) => {}
            Some(GroupKind::Other) => {
                self.counters.other_group += 1;
                self.mixed = true;
                return false;
            }
            // Connectors do not say of which kind a group is: they say nothing of groups that was not known.
            None if tier != Tier::Gpu => return self.stored_below(event, tier, changes),
            None if event.group == 0 && !self.blind => {}
            None => {
                self.counters.unknown_group += 1;
                let first = !self.blind;
                self.blind = true;
                if first {
                    self.forget();
                }
                return first;
            }
        }
        if tier != Tier::Gpu {
            return self.stored_below(event, tier, changes);
        }
        if *self.group.get_or_insert(event.group) != event.group {
            self.counters.other_group += 1;
            return false;
        }
        if self.check(&event) {
            self.place(event, tier, changes);
        }
        false
    }

    fn stored_below(&mut self, event: Stored, tier: Tier, changes: &mut Vec<Change>) -> bool {
        if self.blind || self.group.is_some_and(|group| group != event.group) {
            self.counters.other_group += 1;
        } else if event.tokens.is_empty() {
            self.resolve(&event, tier);
        } else if self.check(&event) {
            self.place(event, tier, changes);
        }
        false
    }

    /// Is the event whole, and of the size that this engine uses?
    fn check(&mut self, event: &Stored) -> bool {
        let size = event.block_size as usize;
        // A partial entry may come first, and says another size than the blocks that will feed the set.
        if self.block_size.is_some_and(|known| event.block_size > known && event.block_size.is_multiple_of(known))
            && self.residency.resident() == 0
            && event.parent.is_none()
        {
            self.forget();
        }
        let placed = (1..=MAX_BLOCK_SIZE).contains(&event.block_size)
            && !event.hashes.is_empty()
            && event.hashes.len().checked_mul(size) == Some(event.tokens.len());
        if !placed {
            self.counters.unplaced += 1;
        } else if self.block_size.is_some_and(|size| size != event.block_size) && !self.blocks.is_empty() {
            // A partial entry, or a group that changed its mind: chains of two sizes never meet.
            self.counters.other_size += 1;
        } else if matches!(&event.extras, Extras::Told(keys) if keys.len() != event.hashes.len())
            || event.extras == Extras::Unreadable
        {
            self.counters.bad_keys += 1;
        } else if is_circular(event) {
            self.counters.circular += 1;
        } else {
            self.block_size = Some(event.block_size);
            self.lookahead |= event.lookahead;
            return true;
        }
        false
    }

    fn removed(&mut self, event: &Removed, changes: &mut Vec<Change>) {
        let Some(tier) = self.tier(event.medium, event.remote) else { return };
        if self.group.is_some_and(|group| group != event.group) {
            self.counters.other_group += 1;
            return;
        }
        self.removes(tier);
        for (at, hash) in event.hashes.iter().enumerate() {
            let block = self.blocks.get_mut(hash);
            let count = block.map(|block| match tier {
                Tier::Gpu => (&mut block.copies, &block.name),
                Tier::Host | Tier::Storage => (&mut block.lower, &block.name),
            });
            let Some((count, name)) = count.filter(|(count, _)| **count > 0) else {
                self.counters.unknown_removed += 1;
                continue;
            };
            let told = event.remaining.as_ref().and_then(|counts| counts.get(at).copied());
            *count = told.unwrap_or(*count - 1);
            match tier {
                Tier::Gpu => self.counters.removed += u64::from(matches!(name, Name::Known(_))),
                Tier::Host | Tier::Storage => self.counters.lower_removed += 1,
            }
            if *count == 0 {
                self.left(*hash, tier, changes);
            }
        }
    }

    /// One tier is empty, and others are not: no version says so yet.
    fn clear_tier(&mut self, medium: Medium, changes: &mut Vec<Change>) {
        let Some(tier) = self.tier(medium, false) else { return };
        for hash in self.blocks.keys().copied().collect::<Vec<_>>() {
            let Some(block) = self.blocks.get_mut(&hash) else { continue };
            let count = if tier == Tier::Gpu { &mut block.copies } else { &mut block.lower };
            if std::mem::take(count) > 0 {
                self.left(hash, tier, changes);
            }
        }
    }
}

/// A hash twice, or a block that follows itself.
fn is_circular(event: &Stored) -> bool {
    let mut seen: HashSet<EngineHash> = event.parent.into_iter().collect();
    !event.hashes.iter().all(|hash| seen.insert(*hash))
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
