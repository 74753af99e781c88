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
//! * *Other tiers.* Counted, not kept: the *any* set of a native engine equals its *gpu* set.

use super::counters::Counters;
use super::dialect::{Adapter, EngineHash, Event, EventBatch, Extras, GroupKind, Key, Medium, Removed, Stored};
use super::names::{self, Nameless};
use crate::block::Fingerprint;
use crate::residency::{Change, FingerprintMap, Link, Residency};
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
    copies: u32,
    name: Name,
}

/// Where a block of an event stands: what is known of what it follows.
#[derive(Debug, Clone, Copy)]
enum After {
    Start,
    Named(Fingerprint),
    Waiting(EngineHash),
    Nameless,
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
                Event::Cleared => {
                    self.counters.cleared += 1;
                    self.forget();
                    true
                }
            };
            if cleared_here {
                // What the set held before does not matter any more.
                changes.clear();
                cleared = true;
            }
        }
        cleared
    }

    /// Forgets every block, as after a restart of the engine or a gap that no replay closes. Group and block size are
    /// learned anew; counters stay.
    pub fn restart(&mut self) {
        self.forget();
        (self.group, self.block_size, self.blind, self.lookahead) = (None, None, false, false);
    }

    fn forget(&mut self) {
        self.blocks = FingerprintMap::default();
        self.waiting = FingerprintMap::default();
        self.parked_tokens = 0;
        self.residency.clear();
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

    /// Does a copy in this place belong to the set that is kept?
    fn in_tier(&mut self, medium: Medium, remote: bool) -> bool {
        match medium {
            Medium::Gpu if !remote => return true,
            Medium::Unknown => self.counters.unknown_medium += 1,
            Medium::Gpu | Medium::Cpu | Medium::Storage => self.counters.other_tier += 1,
        }
        false
    }

    /// Applies a store event. True when it showed that the set so far may not be credited.
    fn stored(&mut self, event: Stored, changes: &mut Vec<Change>) -> bool {
        if !self.in_tier(event.medium, event.remote) {
            return false;
        }
        match event.kind {
            Some(GroupKind::Full) => {}
            Some(GroupKind::Other) => {
                self.counters.other_group += 1;
                return false;
            }
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
        if *self.group.get_or_insert(event.group) != event.group {
            self.counters.other_group += 1;
            return false;
        }
        if self.check(&event) {
            self.place(event, changes);
        }
        false
    }

    /// Is the event whole, and of the size that this engine uses?
    fn check(&mut self, event: &Stored) -> bool {
        let size = event.block_size as usize;
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

    fn place(&mut self, event: Stored, changes: &mut Vec<Change>) {
        let mut after = match event.parent {
            None => After::Start,
            Some(parent) => match self.blocks.get(&parent).map(|block| &block.name) {
                Some(Name::Known(fp)) => After::Named(*fp),
                Some(Name::Without) => After::Nameless,
                Some(Name::Parked(_)) | None => After::Waiting(parent),
            },
        };
        // A repeated announcement cannot be told from a first block computed again: see the head of this file.
        let repeats = event.may_repeat && event.parent.is_none();
        let keys_of = match &event.extras {
            Extras::Told(keys) => keys.as_slice(),
            Extras::Untold | Extras::Unreadable => &[],
        };
        let size = event.block_size as usize;
        for (at, (&hash, tokens)) in event.hashes.iter().zip(event.tokens.chunks_exact(size)).enumerate() {
            let keys = keys_of.get(at).map_or(&[][..], Vec::as_slice);
            let named = self.name(after, &event.adapter, tokens, keys);
            let room = self.blocks.len() < self.limits.blocks;
            after = match (self.blocks.get(&hash).map(|block| &block.name), named) {
                (Some(Name::Known(fp)), Ok(Some((_, other)))) if *fp != other => {
                    // What follows in this event hangs on a contradiction.
                    self.counters.contradicted += 1;
                    return;
                }
                (Some(Name::Known(fp)), _) => {
                    let fp = *fp;
                    self.counters.stored += u64::from(!repeats);
                    self.copy(hash, repeats);
                    After::Named(fp)
                }
                (Some(Name::Without), _) => {
                    self.copy(hash, repeats);
                    After::Nameless
                }
                (Some(Name::Parked(_)), Ok(Some((link, fp)))) => {
                    // Another announcement says what this parked block follows.
                    self.copy(hash, repeats);
                    self.unpark(hash);
                    self.settle(hash, Some((link, fp)), changes)
                }
                (Some(Name::Parked(_)), _) => {
                    self.copy(hash, repeats);
                    After::Waiting(hash)
                }
                (None, _) if !room => {
                    self.counters.over_limit += (event.hashes.len() - at) as u64;
                    return;
                }
                (None, Ok(Some(named))) => self.settle(hash, Some(named), changes),
                (None, Ok(None)) => match after {
                    After::Waiting(parent) => {
                        let (adapter, tokens, keys) = (event.adapter.clone(), tokens.to_vec(), keys.to_vec());
                        self.park(hash, Parked { parent, adapter, tokens, keys }, changes)
                    }
                    After::Start | After::Named(_) | After::Nameless => {
                        self.counters.unnamed_parent += 1;
                        self.settle(hash, None, changes)
                    }
                },
                (None, Err(why)) => {
                    self.count(why);
                    self.settle(hash, None, changes)
                }
            };
        }
    }

    /// The fingerprint of a block and what it follows; `None` when that is not known.
    fn name(
        &self,
        after: After,
        adapter: &Adapter,
        tokens: &[u32],
        keys: &[Key],
    ) -> Result<Option<(Link, Fingerprint)>, Nameless> {
        match after {
            After::Start => names::first(&self.model, self.seed, adapter, tokens, keys).map(Some),
            After::Named(parent) => {
                names::later(parent, adapter, tokens, keys).map(|fp| Some((Link::Block(parent), fp)))
            }
            After::Waiting(_) | After::Nameless => Ok(None),
        }
    }

    fn count(&mut self, why: Nameless) {
        match why {
            Nameless::Adapter => self.counters.unnamed_adapter += 1,
            Nameless::Keys => self.counters.unnamed_keys += 1,
        }
    }

    /// One more copy of a block that is known, unless the event only repeats what is there.
    fn copy(&mut self, hash: EngineHash, repeats: bool) {
        if repeats {
            self.counters.repeated += 1;
        } else if let Some(block) = self.blocks.get_mut(&hash) {
            block.copies = block.copies.saturating_add(1);
        }
    }

    /// Gives a block its name, or the certainty that it has none, and then those that waited for it theirs.
    fn settle(&mut self, hash: EngineHash, named: Option<(Link, Fingerprint)>, changes: &mut Vec<Change>) -> After {
        let fp = self.settle_one(hash, named, changes);
        let mut todo = vec![(hash, fp)];
        while let Some((parent, parent_fp)) = todo.pop() {
            for child in self.waiting.remove(&parent).into_iter().flatten() {
                let Some(Block { name: name @ Name::Parked(_), .. }) = self.blocks.get_mut(&child) else { continue };
                let Name::Parked(parked) = std::mem::replace(name, Name::Without) else { continue };
                self.parked_tokens -= parked.tokens.len();
                let named = match parent_fp {
                    None => {
                        self.counters.unnamed_parent += 1;
                        None
                    }
                    Some(fp) => match names::later(fp, &parked.adapter, &parked.tokens, &parked.keys) {
                        Ok(named) => Some((Link::Block(fp), named)),
                        Err(why) => {
                            self.count(why);
                            None
                        }
                    },
                };
                let fp = self.settle_one(child, named, changes);
                self.counters.unparked += u64::from(fp.is_some());
                todo.push((child, fp));
            }
        }
        fp.map_or(After::Nameless, After::Named)
    }

    fn settle_one(
        &mut self,
        hash: EngineHash,
        named: Option<(Link, Fingerprint)>,
        changes: &mut Vec<Change>,
    ) -> Option<Fingerprint> {
        // Another hash has this name: what makes them differ is hidden from us, unless it is tokens to come.
        let hidden = !self.lookahead && named.is_some_and(|(_, fp)| self.residency.is_resident(fp));
        self.counters.hidden += u64::from(hidden);
        let named = named.filter(|_| !hidden);
        let block = self.blocks.entry(hash).or_insert(Block { copies: 1, name: Name::Without });
        let Some((link, fp)) = named else {
            block.name = Name::Without;
            return None;
        };
        block.name = Name::Known(fp);
        self.counters.stored += u64::from(block.copies);
        self.residency.add(fp, link, changes);
        Some(fp)
    }

    /// Keeps a block until its parent is known.
    fn park(&mut self, hash: EngineHash, parked: Parked, changes: &mut Vec<Change>) -> After {
        if self.parked_tokens + parked.tokens.len() > self.limits.parked_tokens {
            self.counters.over_limit += 1;
            return self.settle(hash, None, changes);
        }
        self.counters.parked += 1;
        self.parked_tokens += parked.tokens.len();
        self.waiting.entry(parked.parent).or_default().insert(hash);
        self.blocks.insert(hash, Block { copies: 1, name: Name::Parked(Box::new(parked)) });
        After::Waiting(hash)
    }

    /// Takes a parked block out of its parent's list. Its name is to be settled, or the block removed.
    fn unpark(&mut self, hash: EngineHash) {
        let Some(Block { name: name @ Name::Parked(_), .. }) = self.blocks.get_mut(&hash) else { return };
        let Name::Parked(parked) = std::mem::replace(name, Name::Without) else { return };
        self.parked_tokens -= parked.tokens.len();
        if let Some(children) = self.waiting.get_mut(&parked.parent) {
            children.remove(&hash);
            if children.is_empty() {
                self.waiting.remove(&parked.parent);
            }
        }
    }

    fn removed(&mut self, event: &Removed, changes: &mut Vec<Change>) {
        if !self.in_tier(event.medium, event.remote) {
            return;
        }
        if self.group.is_some_and(|group| group != event.group) {
            self.counters.other_group += 1;
            return;
        }
        for (at, hash) in event.hashes.iter().enumerate() {
            let Some(block) = self.blocks.get_mut(hash) else {
                self.counters.unknown_removed += 1;
                continue;
            };
            let told = event.remaining.as_ref().and_then(|counts| counts.get(at).copied());
            block.copies = told.unwrap_or(block.copies.saturating_sub(1));
            let fp = if let Name::Known(fp) = block.name { Some(fp) } else { None };
            self.counters.removed += u64::from(fp.is_some());
            if block.copies > 0 {
                continue;
            }
            self.unpark(*hash);
            self.blocks.remove(hash);
            if let Some(fp) = fp {
                self.residency.drop(fp, changes);
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
