//! Placing the blocks of a store event: named after what they follow, parked until that is known, or without a name.

use super::lower::Tier;
use super::{Block, Name, NativeEngine, Parked};
use crate::block::Fingerprint;
use crate::native::dialect::{Adapter, EngineHash, Extras, Key, Stored};
use crate::native::names::{self, Nameless};
use crate::residency::{Change, Link};

/// Where a block of an event stands: what is known of what it follows.
#[derive(Debug, Clone, Copy)]
enum After {
    Start,
    Named(Fingerprint),
    Waiting(EngineHash),
    Nameless,
}

impl NativeEngine {
    pub(super) fn place(&mut self, event: Stored, tier: Tier, changes: &mut Vec<Change>) {
        let mut after = match event.parent {
            None => After::Start,
            Some(parent) => match self.blocks.get(&parent).map(|block| &block.name) {
                Some(Name::Known(fp)) => After::Named(*fp),
                Some(Name::Without) => After::Nameless,
                Some(Name::Parked(_)) | None => After::Waiting(parent),
            },
        };
        // A repeated announcement cannot be told from a first block computed again: see the head of `engine.rs`.
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
                    let link = named.ok().flatten().map(|(link, _)| link).or_else(|| self.parent_of(hash, fp));
                    let repeated = self.counters.repeated;
                    let first = self.copy(hash, tier, repeats);
                    self.counters.stored += u64::from(tier == Tier::Gpu && repeated == self.counters.repeated);
                    if let (true, Some(link)) = (first, link) {
                        self.arrived(fp, link, tier, changes);
                    }
                    After::Named(fp)
                }
                (Some(Name::Without), _) => {
                    self.copy(hash, tier, repeats);
                    After::Nameless
                }
                (Some(Name::Parked(_)), Ok(Some((link, fp)))) => {
                    // Another announcement says what this parked block follows.
                    self.copy(hash, tier, repeats);
                    self.unpark(hash);
                    self.settle(hash, Some((link, fp)), changes)
                }
                (Some(Name::Parked(_)), _) => {
                    self.copy(hash, tier, repeats);
                    After::Waiting(hash)
                }
                (None, _) if !room => {
                    self.counters.over_limit += (event.hashes.len() - at) as u64;
                    return;
                }
                (None, Ok(Some(named))) => {
                    self.insert(hash, tier, Name::Without);
                    self.settle(hash, Some(named), changes)
                }
                (None, Ok(None)) => match after {
                    After::Waiting(parent) => {
                        let (adapter, tokens, keys) = (event.adapter.clone(), tokens.to_vec(), keys.to_vec());
                        self.park(hash, tier, Parked { parent, adapter, tokens, keys }, changes)
                    }
                    After::Start | After::Named(_) | After::Nameless => {
                        self.counters.unnamed_parent += 1;
                        self.insert(hash, tier, Name::Without);
                        self.settle(hash, None, changes)
                    }
                },
                (None, Err(why)) => {
                    self.count(why);
                    self.insert(hash, tier, Name::Without);
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

    fn insert(&mut self, hash: EngineHash, tier: Tier, name: Name) {
        self.blocks.insert(hash, Block { copies: 0, lower: 0, name });
        self.copy(hash, tier, false);
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
        let taken = |fp| self.residency.is_resident(fp) || self.any().is_some_and(|any| any.is_resident(fp));
        let hidden = !self.lookahead && named.is_some_and(|(_, fp)| taken(fp));
        self.counters.hidden += u64::from(hidden);
        let named = named.filter(|_| !hidden);
        let block = self.blocks.get_mut(&hash)?;
        let Some((link, fp)) = named else {
            block.name = Name::Without;
            return None;
        };
        block.name = Name::Known(fp);
        let (copies, lower) = (block.copies, block.lower);
        self.counters.stored += u64::from(copies);
        if copies > 0 {
            self.arrived(fp, link, Tier::Gpu, changes);
        }
        if lower > 0 {
            self.arrived(fp, link, Tier::Host, changes);
        }
        Some(fp)
    }

    /// Keeps a block until its parent is known.
    fn park(&mut self, hash: EngineHash, tier: Tier, parked: Parked, changes: &mut Vec<Change>) -> After {
        if self.parked_tokens + parked.tokens.len() > self.limits.parked_tokens {
            self.counters.over_limit += 1;
            self.insert(hash, tier, Name::Without);
            return self.settle(hash, None, changes);
        }
        self.counters.parked += 1;
        self.parked_tokens += parked.tokens.len();
        self.waiting.entry(parked.parent).or_default().insert(hash);
        self.insert(hash, tier, Name::Parked(Box::new(parked)));
        After::Waiting(hash)
    }

    /// Takes a parked block out of its parent's list. Its name is to be settled, or the block removed.
    pub(super) fn unpark(&mut self, hash: EngineHash) {
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
}
