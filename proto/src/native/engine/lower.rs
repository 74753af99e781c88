//! Tiers below the GPU: host memory and storage of this machine, as KV connectors announce them.
//!
//! The *any* set is what the engine can take from somewhere: vLLM goes through the GPU's blocks first, then through the
//! lower tiers', and never back up. So a block is in it when it is in the *gpu* set, or when it is resident below and
//! its parent is in *any*. [`Residency`] gives exactly that when it is told of what becomes reachable on the GPU and of
//! what is resident below as copies. Nothing of this is kept before a connector announces something.
//!
//! Connectors often announce hashes alone (OffloadingConnector: no tokens, no parent). Those are resolved through the
//! names that the GPU's own events gave, also of blocks that left the GPU in the same step, since connector events
//! come last in a batch. A connector that never announces removals (LMCache) is believed for [`ADVISORY_MS`].

use super::{Name, NativeEngine};
use crate::block::Fingerprint;
use crate::native::dialect::{EngineHash, Medium, Stored};
use crate::residency::{Change, FingerprintMap, Link, Residency};
use std::collections::VecDeque;

/// How long a stored block is believed in where removals were never announced, in milliseconds.
pub const ADVISORY_MS: u64 = 600_000;

/// Where a copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tier {
    Gpu,
    Host,
    Storage,
}

impl Tier {
    /// The tier of a copy in this place; `None` where it belongs to no set that is kept.
    pub(super) fn of(medium: Medium) -> Option<Tier> {
        match medium {
            Medium::Gpu => Some(Tier::Gpu),
            Medium::Cpu => Some(Tier::Host),
            Medium::Storage => Some(Tier::Storage),
            Medium::Unknown => None,
        }
    }
}

/// What is known below the GPU.
#[derive(Debug, Clone, Default)]
pub(super) struct Lower {
    pub(super) any: Residency,
    changes: Vec<Change>,
    emptied: bool,
    /// Were removals announced from host memory, from storage?
    removes: [bool; 2],
    /// Stores of tiers that never announced a removal, with their time: at most as many as blocks may be kept.
    advisory: VecDeque<(u64, Tier, EngineHash)>,
    /// Blocks that lost their last copy in this batch, and what they followed.
    dying: FingerprintMap<Link>,
}

impl NativeEngine {
    /// The *any* set; `None` while it is the *gpu* set.
    pub fn any(&self) -> Option<&Residency> {
        self.lower.as_ref().map(|lower| &lower.any)
    }

    /// Moves the changes of the *any* set since this was last asked into `changes`. True when the set was emptied at
    /// once before them.
    pub fn any_changes(&mut self, changes: &mut Vec<Change>) -> bool {
        changes.clear();
        let Some(lower) = self.lower.as_mut() else { return false };
        changes.append(&mut lower.changes);
        std::mem::take(&mut lower.emptied)
    }

    /// Tells the time, in milliseconds on any clock that does not go back: what is only believed for a while goes.
    pub fn tick(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        while let Some((at_ms, tier, hash)) = self.lower.as_mut().and_then(|lower| lower.advisory.pop_front()) {
            if now_ms.saturating_sub(at_ms) < ADVISORY_MS {
                if let Some(lower) = self.lower.as_mut() {
                    lower.advisory.push_front((at_ms, tier, hash));
                }
                return;
            }
            self.expire(hash);
        }
    }

    fn expire(&mut self, hash: EngineHash) {
        let Some(block) = self.blocks.get_mut(&hash).filter(|block| block.lower > 0) else { return };
        self.counters.expired += 1;
        block.lower -= 1;
        if block.lower == 0 {
            self.left(hash, Tier::Host, &mut Vec::new());
        }
    }

    pub(super) fn forget_lower(&mut self) {
        if let Some(lower) = self.lower.as_mut() {
            let removes = lower.removes;
            **lower = Lower { emptied: true, removes, ..Lower::default() };
        }
    }

    /// From the first announcement on, *any* is kept beside *gpu*.
    fn lower(&mut self) -> &mut Lower {
        let gpu = &self.residency;
        self.lower.get_or_insert_with(|| {
            let mut lower = Box::new(Lower::default());
            gpu.chains(|link, run| {
                let mut link = link;
                for &fp in run {
                    lower.any.add(fp, link, &mut lower.changes);
                    link = Link::Block(fp);
                }
            });
            lower
        })
    }

    /// One more copy. True when it is the first one in its tier, or (`repeats`) nothing when it may be no copy at all.
    pub(super) fn copy(&mut self, hash: EngineHash, tier: Tier, repeats: bool) -> bool {
        let Some(block) = self.blocks.get_mut(&hash) else { return false };
        let count = if tier == Tier::Gpu { &mut block.copies } else { &mut block.lower };
        if repeats && tier == Tier::Gpu && *count > 0 {
            self.counters.repeated += 1;
            return false;
        }
        *count = count.saturating_add(1);
        let first = *count == 1;
        if tier != Tier::Gpu {
            self.counters.lower_stored += 1;
            let (now_ms, room) = (self.now_ms, self.limits.blocks);
            let lower = self.lower();
            if !lower.removes[usize::from(tier == Tier::Storage)] {
                lower.advisory.push_back((now_ms, tier, hash));
                if lower.advisory.len() > room
                    && let Some((_, _, oldest)) = lower.advisory.pop_front()
                {
                    self.expire(oldest);
                }
            }
        }
        first
    }

    /// The first copy of a named block in a tier.
    pub(super) fn arrived(&mut self, fp: Fingerprint, link: Link, tier: Tier, changes: &mut Vec<Change>) {
        if tier != Tier::Gpu {
            let lower = self.lower();
            lower.any.add(fp, link, &mut lower.changes);
            return;
        }
        let from = changes.len();
        self.residency.add(fp, link, changes);
        self.mirror(&changes[from..]);
    }

    /// The last copy in a tier is gone, and with the last one of all the block.
    pub(super) fn left(&mut self, hash: EngineHash, tier: Tier, changes: &mut Vec<Change>) {
        let Some(block) = self.blocks.get(&hash) else { return };
        let over = block.copies == 0 && block.lower == 0;
        let Name::Known(fp) = block.name else {
            if over {
                self.unpark(hash);
                self.blocks.remove(&hash);
            }
            return;
        };
        if tier != Tier::Gpu {
            if let Some(lower) = self.lower.as_mut() {
                lower.any.drop(fp, &mut lower.changes);
            }
            if over {
                self.blocks.remove(&hash);
            }
            return;
        }
        let link = self.residency.parent(fp);
        let from = changes.len();
        self.residency.drop(fp, changes);
        self.mirror(&changes[from..]);
        match (over, self.lower.as_mut(), link) {
            (false, ..) => {}
            (true, Some(lower), Some(link)) => drop(lower.dying.insert(hash, link)),
            (true, ..) => drop(self.blocks.remove(&hash)),
        }
    }

    /// What changed on the GPU changes here.
    fn mirror(&mut self, changes: &[Change]) {
        let Some(lower) = self.lower.as_mut() else { return };
        for change in changes {
            match *change {
                Change::Added { parent, fp } => lower.any.add(fp, parent, &mut lower.changes),
                Change::Removed { fp } => drop(lower.any.drop(fp, &mut lower.changes)),
            }
        }
    }

    /// What a named block follows, also when it left the GPU in this batch.
    pub(super) fn parent_of(&self, hash: EngineHash, fp: Fingerprint) -> Option<Link> {
        let lower = self.lower.as_ref();
        let below = || lower.and_then(|lower| lower.any.parent(fp).or(lower.dying.get(&hash).copied()));
        self.residency.parent(fp).or_else(below)
    }

    /// A store of hashes alone: known blocks have another copy.
    pub(super) fn resolve(&mut self, event: &Stored, tier: Tier) {
        self.lower();
        for &hash in &event.hashes {
            let Some(block) = self.blocks.get(&hash) else {
                self.counters.unresolved += 1;
                continue;
            };
            let fp = if let Name::Known(fp) = block.name { Some(fp) } else { None };
            let named = fp.and_then(|fp| Some((fp, self.parent_of(hash, fp)?)));
            if self.copy(hash, tier, false)
                && let Some((fp, link)) = named
            {
                self.arrived(fp, link, tier, &mut Vec::new());
            }
        }
    }

    /// A removal in this tier was announced: from now on its stores are no mere advice.
    pub(super) fn removes(&mut self, tier: Tier) {
        let at = usize::from(tier == Tier::Storage);
        if let Some(lower) = self.lower.as_mut().filter(|lower| tier != Tier::Gpu && !lower.removes[at]) {
            lower.removes[at] = true;
            lower.advisory.retain(|(_, of, _)| *of != tier);
        }
    }

    /// The batch is applied: blocks that nothing holds any more are forgotten.
    pub(super) fn bury(&mut self) {
        let Some(lower) = self.lower.as_mut() else { return };
        for (hash, _) in lower.dying.drain() {
            if self.blocks.get(&hash).is_some_and(|block| block.copies == 0 && block.lower == 0) {
                self.blocks.remove(&hash);
            }
        }
    }
}

#[cfg(test)]
#[path = "lower_tests.rs"]
mod tests;
