//! The engine's side: what the engine's thread calls. Nothing here waits or fails; what goes wrong is counted.

mod adapted;
mod gauges;

use adapted::Using;
pub use gauges::Gauges;

use crate::facts::{Counts, Facts};
use crate::plan::Plan;
use crate::record::Pen;
use crate::requests::{Grain, Item, Live, Requests, Tokens, Which, adapter_name};
use crate::ring::Writer;
use crate::slots::{Key, Slots};
use crate::tiers::{Report, Tiers, UNKNOWN_MEDIUM};
use proto::block::{Fingerprint, Namespace, root};
use proto::residency::Link;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A request as the engine announces it.
#[derive(Debug)]
pub struct Request<'a, T: Tokens + ?Sized> {
    /// The engine's id of it.
    pub id: &'a str,
    /// Its token ids: the prompt, and what was generated so far.
    pub tokens: &'a T,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// LoRA adapter name, "" for none.
    pub adapter: &'a str,
    /// Where the adapter was loaded from, for engines that hash it; else "".
    pub adapter_path: &'a str,
    /// Cache salt, "" for none.
    pub salt: &'a str,
}

/// The engine's handle. One thread owns it.
pub struct Engine {
    plan: Plan,
    grain: Grain,
    model: String,
    seed: u64,
    slots: Slots,
    // Where a KV connector reports of tiers below the GPU.
    tiers: Option<Tiers>,
    requests: Requests,
    pen: Pen,
    gauges: Arc<Gauges>,
    wake: Box<dyn Fn() + Send + Sync>,
    run: Vec<(u32, Fingerprint)>,
    // Prompt tokens not computed yet, over all live requests; and how many started ones have some.
    backlog: u64,
    prefilling: usize,
    using: Using,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("live", &self.requests.len()).finish_non_exhaustive()
    }
}

/// Longest chain in one record: 128 blocks, so that it fits the smallest ring many times over.
const CHAIN: usize = 128;

impl Engine {
    /// `model` is the namespace's; `wake` must neither wait nor fail.
    pub fn new(
        facts: &Facts,
        model: &str,
        seed: u64,
        ring: Writer,
        gauges: Arc<Gauges>,
        wake: Box<dyn Fn() + Send + Sync>,
    ) -> Self {
        Self {
            grain: Grain { unit: facts.block_size as usize, ahead: facts.plan.hits.ahead as usize },
            plan: facts.plan.clone(),
            model: model.to_string(),
            seed,
            slots: Slots::new(facts.total_blocks as usize),
            tiers: None,
            requests: Requests::default(),
            pen: Pen::new(ring),
            gauges,
            wake,
            run: Vec::with_capacity(CHAIN),
            backlog: 0,
            prefilling: 0,
            using: Using::default(),
        }
    }

    /// Is this request followed?
    pub fn knows<'a>(&mut self, which: impl Into<Which<'a>>) -> bool {
        self.requests.get(which).is_some()
    }

    /// A request entered the scheduler. Names the blocks of its prompt; only its first `nameable` tokens can be named.
    /// Gives the agent's number of it.
    pub fn arrived<T: Tokens + ?Sized>(&mut self, request: &Request<'_, T>, items: Vec<Item>, nameable: usize) -> u64 {
        let number = self.follow(request, items, nameable);
        let told = self.pen.arrived(request.id);
        self.life(told);
        self.tell();
        number
    }

    /// As [`Engine::arrived`], for a request that is live already: nothing is told of its arrival.
    pub fn follow<T: Tokens + ?Sized>(&mut self, request: &Request<'_, T>, items: Vec<Item>, nameable: usize) -> u64 {
        let number = self.requests.number();
        let root = root(Namespace { model: &self.model, adapter: request.adapter, salt: request.salt }, self.seed);
        let adapter = self.requests.adapter(request.adapter);
        if !request.adapter_path.is_empty() && self.requests.reloaded(adapter.unwrap_or(0), request.adapter_path) {
            // Its old blocks keep their keys in the engine, but no prompt hits them any more.
            let held = self.slots.held();
            self.lose(held.into_iter());
        }
        let prompt_tokens = u32::try_from(request.prompt_tokens).unwrap_or(u32::MAX);
        let mut live = Live::new(number, root, adapter.unwrap_or(0), prompt_tokens, items);
        live.nameable = if adapter.is_none() { 0 } else { nameable };
        live.names(self.grain.names(request.prompt_tokens), self.grain, request.tokens);
        self.forget(request.id);
        let adapter = live.adapter;
        if self.requests.insert(request.id, live) {
            self.backlog += u64::from(prompt_tokens);
            self.using.waits(adapter);
        } else {
            self.gauges.fault();
        }
        number
    }

    /// The tokens of a live request were changed, not just continued: its names are made anew when they are needed.
    pub fn forget(&mut self, id: &str) -> Option<u64> {
        let live = self.requests.remove(id)?;
        self.backlog -= u64::from(live.left);
        self.using.leaves(live.adapter, live.started);
        self.prefilling -= usize::from(live.started && live.left > 0);
        Some(live.number)
    }

    /// A hook of the pool failed, so that the table may be wrong: nothing is published of what was there, until it is
    /// named again. `cached` are the blocks that have a key now.
    pub fn lose(&mut self, cached: impl Iterator<Item = u32>) {
        self.slots.clear(&mut self.pen);
        self.tiers.iter_mut().for_each(Tiers::forgotten);
        for block in cached {
            self.slots.store_unnamed(&mut self.pen, block, true);
        }
        self.ring();
    }

    /// How many blocks hold something that a prompt may hit and that has no name.
    pub fn lost(&self) -> usize {
        self.slots.lost()
    }

    /// How many blocks of a group a hit of so many tokens covers wholly.
    pub fn whole_blocks(&self, group: u32, tokens: usize) -> usize {
        let block = self.plan.place(group).map_or(0, |place| place.units * self.grain.unit);
        tokens.checked_div(block).unwrap_or(0)
    }

    /// A lookup hit these blocks of a group, the first ones of the request: those that were lost get their names back.
    pub fn hit<'a>(
        &mut self,
        which: impl Into<Which<'a>>,
        tokens: &(impl Tokens + ?Sized),
        group: u32,
        blocks: &[Option<u32>],
    ) {
        let lost = |block: &Option<u32>| block.filter(|block| self.slots.is_lost(*block));
        let lost: Vec<Option<u32>> = blocks.iter().map(lost).collect();
        if lost.iter().any(Option::is_some) {
            self.cached(which, tokens, group, 0, &lost);
        }
    }

    /// The engine looked a request of `total` tokens up and found `delivered` of them; `bypassed` says that it did
    /// not even look.
    pub fn looked_up<'a>(
        &mut self,
        which: impl Into<Which<'a>>,
        tokens: &(impl Tokens + ?Sized),
        total: usize,
        delivered: usize,
        bypassed: bool,
    ) {
        self.settle();
        let owes = self.slots.owes();
        let Some((live, _)) = self.requests.get(which) else { return };
        live.delivers(delivered);
        if live.nameable == 0 || owes || self.slots.lost() > 0 {
            return;
        }
        let total = if bypassed { 0 } else { total };
        let blocks = self.grain.names(total);
        let number = live.number;
        let names = live.names(blocks, self.grain, tokens);
        if names.len() == blocks {
            let seq = self.gauges.published.load(Ordering::Relaxed);
            live.predicted = self.pen.looked(number, seq, total as u64, names);
        }
    }

    /// As [`Engine::looked_up`], by rules that are not the engine's own: a KV connector is asked for what is missing.
    pub fn looked_up_elsewhere<'a>(&mut self, which: impl Into<Which<'a>>, delivered: usize) {
        self.requests.get(which).into_iter().for_each(|(live, _)| live.delivers(delivered));
    }

    /// Physical blocks of a group got keys of a request that is not followed: they have no names.
    pub fn cached_by_stranger(&mut self, group: u32, blocks: &[Option<u32>]) {
        self.settle();
        if self.plan.place(group).is_none() {
            return;
        }
        for block in blocks.iter().flatten() {
            self.slots.store_unnamed(&mut self.pen, *block, true);
        }
    }

    /// Physical blocks of a request got keys in a group, each in place of what it had: `blocks[i]` holds block
    /// `first + i` of the group, `None` where nothing is cached. False, and nothing done, when the request is not
    /// followed.
    pub fn cached<'a>(
        &mut self,
        which: impl Into<Which<'a>>,
        tokens: &(impl Tokens + ?Sized),
        group: u32,
        first: usize,
        blocks: &[Option<u32>],
    ) -> bool {
        self.settle();
        let Some((live, adapters)) = self.requests.get(which) else { return false };
        let Some(place) = self.plan.place(group) else { return true };
        let (units, group) = (place.units, group as u16);
        let (root, adapter) = (live.root, (live.adapter, adapter_name(adapters, live.adapter)));
        let nameable = live.nameable;
        let names = live.names((first + blocks.len()) * units, self.grain, tokens);
        let name = |block: usize| names.get((block + 1) * units - 1).copied();
        let parent = |start: usize| match start.checked_sub(1).and_then(name) {
            Some(before) => Link::Block(before),
            None => Link::Root(root),
        };
        let mut strays = 0;
        let mut start = first;
        self.run.clear();
        for (at, block) in (first..).zip(blocks) {
            let named = block.zip(name(at));
            if named.is_none() || self.run.len() == CHAIN {
                if !self.run.is_empty() {
                    strays += self.slots.store(&mut self.pen, group, parent(start), adapter, &self.run);
                    self.run.clear();
                }
                start = at;
            }
            match (named, block) {
                (Some(named), _) => self.run.push(named),
                (None, block) => {
                    if let Some(block) = block {
                        let lost = (at + 1) * units * self.grain.unit <= nameable;
                        self.slots.store_unnamed(&mut self.pen, *block, lost);
                    }
                    start = at + 1;
                }
            }
        }
        if !self.run.is_empty() {
            strays += self.slots.store(&mut self.pen, group, parent(start), adapter, &self.run);
        }
        if strays > 0 {
            self.gauges.fault();
        }
        true
    }

    /// A physical block of a group got a key for the first `end` tokens of a request, which end inside the block or
    /// with it; `alone` says that it has no other key now. False, and nothing done, when the request is not followed.
    pub fn cached_partial<'a>(
        &mut self,
        which: impl Into<Which<'a>>,
        tokens: &(impl Tokens + ?Sized),
        group: u32,
        block: u32,
        end: usize,
        alone: bool,
    ) -> bool {
        self.settle();
        let Some((live, adapters)) = self.requests.get(which) else { return false };
        let Some(place) = self.plan.place(group) else { return true };
        let units = self.grain.names(end + self.grain.ahead);
        let (root, number, nameable) = (live.root, live.adapter, live.nameable);
        let names = live.names(units, self.grain, tokens);
        let name = |units: usize| units.checked_sub(1).and_then(|at| names.get(at)).copied();
        let partial = !units.is_multiple_of(place.units);
        // What it follows is the last whole block of the group before it.
        let before = (units.saturating_sub(1)) / place.units * place.units;
        let key = name(units).filter(|_| names.len() == units).map(|fp| Key {
            fp,
            parent: name(before).map_or(Link::Root(root), Link::Block),
            adapter: number,
            group: group as u16,
            partial,
        });
        let pen = &mut self.pen;
        if alone {
            self.slots.evict(pen, std::iter::once(block));
        }
        let done = match key {
            Some(key) => self.slots.add(pen, block, key, adapter_name(adapters, number)),
            None => self.slots.store_unnamed(pen, block, end <= nameable),
        };
        if !done {
            self.gauges.fault();
        }
        true
    }

    /// A KV connector reports of tiers below the GPU; see [`Tiers::new`].
    pub fn follow_tiers(&mut self, factor: usize, lasting: bool) {
        self.tiers = Some(Tiers::new(self.slots.len(), factor, lasting));
    }

    /// Are they followed?
    pub fn follows_tiers(&self) -> bool {
        self.tiers.is_some()
    }

    /// Are the hashes of a group's blocks wanted? Those of the first spec of full attention are, when tiers are followed.
    pub fn wants_hashes(&self, group: u32) -> bool {
        let place = self.plan.place(group).filter(|place| place.member == 0);
        self.tiers.is_some() && place.is_some_and(|place| self.plan.hits.specs[place.spec].set == 0)
    }

    /// Fingerprints a block of a group, 1 for a group that is not followed.
    pub fn units(&self, group: u32) -> usize {
        self.plan.place(group).map_or(1, |place| place.units)
    }

    /// The engine's hashes (their last 8 bytes) of blocks of a request that were cached: `hashes[i]` is of block
    /// `first + i` of the group.
    pub fn hashed<'a>(&mut self, which: impl Into<Which<'a>>, group: u32, first: usize, hashes: &[u64]) {
        let (Some(tiers), Some(place)) = (&mut self.tiers, self.plan.place(group)) else { return };
        let Some((live, _)) = self.requests.get(which) else { return };
        let (root, adapter) = (live.root, live.adapter);
        let known = live.known();
        let name = |block: usize| known.get((block + 1) * place.units - 1).copied();
        for (at, hash) in (first..).zip(hashes) {
            let Some(fp) = name(at) else { return };
            let parent = at.checked_sub(1).and_then(name).map_or(Link::Root(root), Link::Block);
            tiers.cached(*hash, fp, parent, adapter);
        }
    }

    /// The connector reports, at `now_ms` on a clock that never goes back.
    pub fn reported(&mut self, reports: impl Iterator<Item = Report>, now_ms: u64) {
        if let Some(tiers) = &mut self.tiers {
            for report in reports {
                if matches!(report, Report::Stored { medium: UNKNOWN_MEDIUM, .. }) {
                    self.gauges.unknown_medium();
                }
                tiers.report(report, now_ms);
            }
            tiers.expire(now_ms);
            self.gauges.unknown_below.store(tiers.unknown, Ordering::Relaxed);
        }
        self.settle();
    }

    /// The keys of one physical block were given to another.
    pub fn moved(&mut self, from: u32, to: u32) {
        self.settle();
        self.slots.moved(&mut self.pen, from, to);
    }

    /// Physical blocks were handed out or evicted: they have no key any more.
    pub fn evicted(&mut self, blocks: impl Iterator<Item = u32>) {
        self.slots.evict(&mut self.pen, blocks);
    }

    /// The whole cache was emptied. Told at once.
    pub fn cleared(&mut self) {
        self.slots.clear(&mut self.pen);
        self.tiers.iter_mut().for_each(Tiers::forgotten);
        self.ring();
    }

    /// A request was scheduled; the first time, what the last lookup delivered is told.
    pub fn started(&mut self, id: &str) {
        let Some((live, _)) = self.requests.get(id) else { return };
        if std::mem::replace(&mut live.started, true) {
            return;
        }
        let (number, prompt_tokens, delivered) = (live.number, live.prompt_tokens, live.delivered);
        let predicted = live.predicted;
        self.using.starts(live.adapter);
        self.prefilling += usize::from(live.left > 0);
        self.progressed(id, delivered);
        let told = self.pen.started(number, id, prompt_tokens, delivered, predicted);
        self.life(told);
    }

    /// How many started requests have prompt tokens left: while there are none, [`Engine::progressed`] need not be
    /// called.
    pub fn prefilling(&self) -> usize {
        self.prefilling
    }

    /// So many more tokens of a started request are computed.
    pub fn progressed(&mut self, id: &str, tokens: u32) {
        let Some((live, _)) = self.requests.get(id) else { return };
        if live.left > 0 {
            let done = live.left.min(tokens);
            live.left -= done;
            self.prefilling -= usize::from(live.started && live.left == 0);
            self.backlog -= u64::from(done);
        }
    }

    /// A request ended, in whatever way.
    pub fn finished(&mut self, id: &str, reason: &str) {
        let number = self.forget(id).unwrap_or(0);
        let told = self.pen.finished(number, id, reason);
        self.life(told);
        if self.using.owes() {
            self.tell();
        }
    }

    /// The engine's counts, as of now.
    pub fn counts(&mut self, counts: Counts) {
        let g = &self.gauges;
        g.running.store(counts.running, Ordering::Relaxed);
        g.waiting.store(counts.waiting, Ordering::Relaxed);
        g.backlog_tokens.store(self.backlog, Ordering::Relaxed);
        let share = if counts.kv_use.is_finite() { counts.kv_use.clamp(0.0, 1.0) } else { 0.0 };
        g.kv_use.store(share.to_bits(), Ordering::Relaxed);
    }

    /// A step ended.
    pub fn step_ended(&mut self) {
        self.gauges.steps.fetch_add(1, Ordering::Relaxed);
        self.tell();
    }

    /// A part of a step ended after which the publisher should look: requests were scheduled, and the model runs now.
    pub fn tell(&mut self) {
        self.settle();
        self.using.settle(&mut self.pen, self.requests.adapters());
        self.ring();
    }

    /// A hook caught an exception.
    pub fn fault(&mut self) {
        self.gauges.fault();
    }

    /// Wakes the publisher, who sees by the gauge whether something is owed to it.
    fn ring(&self) {
        let owes = self.slots.owes() || self.tiers.as_ref().is_some_and(Tiers::owes) || self.using.owes();
        self.gauges.owes.store(owes, Ordering::Relaxed);
        (self.wake)();
    }

    fn settle(&mut self) {
        let adapters = self.requests.adapters();
        if self.slots.owes() {
            self.slots.settle(&mut self.pen, |number| adapter_name(adapters, number));
        }
        // A clear that is owed would undo it.
        if let Some(tiers) = self.tiers.as_mut().filter(|tiers| tiers.owes() && !self.slots.owes()) {
            tiers.settle(&mut self.pen, |number| adapter_name(adapters, number));
        }
    }

    // A step in a life that found no room is not told later: its time is over. Sets and adapters are.
    fn life(&self, told: bool) {
        if !told {
            self.gauges.untold.fetch_add(1, Ordering::Relaxed);
        }
    }
}
