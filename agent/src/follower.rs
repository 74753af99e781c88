//! The publisher's side of the truth: the engine's records in, changes of the published sets out.

use crate::adapters::{Adapters, Lists};
use crate::plan::Plan;
use crate::record::Record;
use crate::requests::MAX_LIVE;
use crate::resident::{Changes, Resident};
use proto::block::Fingerprint;
use proto::event::Life;
use proto::residency::{FingerprintMap, Link};
use std::collections::HashMap;

/// What one publisher step gathered.
#[derive(Debug, Default)]
pub struct Step {
    /// All sets were emptied before the changes.
    pub cleared: bool,
    /// Changes of the sets.
    pub changes: Changes,
    /// Steps in the lives of requests.
    pub lives: Vec<Life>,
}

impl Step {
    /// Nothing happened.
    pub fn is_empty(&self) -> bool {
        !self.cleared && self.changes.iter().all(Vec::is_empty) && self.lives.is_empty()
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Held {
    // 0: empty, or cached and unknown.
    fp: Fingerprint,
    // The root that it follows, where its adapter's name is kept; 0 otherwise.
    root: Fingerprint,
    group: u32,
    partial: bool,
    unnamed: bool,
}

#[derive(Debug)]
struct RootName {
    adapter: String,
    copies: u64,
}

/// What one engine's blocks hold, and its sets.
#[derive(Debug)]
pub struct Follower {
    held: Vec<Held>,
    // Further keys of blocks that have several.
    more: HashMap<u64, Vec<Held>>,
    sets: Resident,
    // Roots of adapters: as many as have a copy, and those that lost theirs in this step.
    roots: FingerprintMap<RootName>,
    lost_roots: bool,
    // Predictions of requests that were looked up and have not started: as many as wait, at most MAX_LIVE.
    predictions: HashMap<u64, (u32, u64)>,
    adapters: Adapters,
    unnamed: u64,
}

impl Follower {
    /// Follows a pool of `blocks` blocks, and adapters from none on.
    pub fn new(plan: Plan, blocks: usize, adapters: Adapters) -> Self {
        Self {
            held: vec![Held::default(); blocks],
            more: HashMap::new(),
            sets: Resident::new(plan),
            roots: FingerprintMap::default(),
            lost_roots: false,
            predictions: HashMap::new(),
            adapters,
            unnamed: 0,
        }
    }

    /// The sets.
    pub fn sets(&self) -> &Resident {
        &self.sets
    }

    /// Cached blocks without a name.
    pub fn unnamed(&self) -> u64 {
        self.unnamed
    }

    /// The adapter of a root, "" for none.
    pub fn adapter(&self, root: Fingerprint) -> &str {
        self.roots.get(&root).map_or("", |root| &root.adapter)
    }

    /// Adapters, as of the last [`Follower::told`].
    pub fn adapters(&self) -> &Lists {
        self.adapters.lists()
    }

    /// Applies one record.
    pub fn apply(&mut self, record: Record<'_>, step: &mut Step) {
        match record {
            Record::Stored { group, parent, adapter, pairs } => {
                let mut before = parent;
                for pair in pairs.chunks_exact(2) {
                    self.empty(pair[0], step);
                    self.add(pair[0], (group, false), pair[1], (before, &adapter), step);
                    before = Link::Block(pair[1]);
                }
            }
            Record::Added { group, partial, parent, adapter, block, fp } => {
                self.add(block, (group, partial), fp, (parent, &adapter), step);
            }
            Record::Below { fp, parent, adapter, below } => {
                if let Link::Root(root) = parent
                    && !adapter.is_empty()
                {
                    let name = || RootName { adapter, copies: 0 };
                    let root = self.roots.entry(root).or_insert_with(name);
                    root.copies = if below { root.copies + 1 } else { root.copies.saturating_sub(1) };
                    self.lost_roots |= root.copies == 0;
                }
                match below {
                    true => self.sets.add_below(fp, parent, &mut step.changes),
                    false => self.sets.drop_below(fp, &mut step.changes),
                }
            }
            Record::Moved { from, to } => {
                self.empty(to, step);
                if let (true, Some(held)) = (self.held.len() as u64 > to, self.held.get_mut(from as usize)) {
                    self.held[to as usize] = std::mem::take(held);
                    if let Some(more) = self.more.remove(&from) {
                        self.more.insert(to, more);
                    }
                }
            }
            Record::Unnamed { blocks } => {
                for block in blocks {
                    self.empty(*block, step);
                    if let Some(held) = self.held.get_mut(*block as usize) {
                        held.unnamed = true;
                        self.unnamed += 1;
                    }
                }
            }
            Record::Evicted { blocks } => blocks.iter().for_each(|block| self.empty(*block, step)),
            Record::Cleared => {
                self.held.fill(Held::default());
                self.more.clear();
                self.sets.clear();
                self.roots.clear();
                self.unnamed = 0;
                step.changes.iter_mut().for_each(Vec::clear);
                step.cleared = true;
            }
            Record::Looked { request, seq, tokens, prompt } => {
                if let Some(tokens) = self.sets.hit(prompt, tokens as usize) {
                    // A ring without room for the start and the end of a request leaves its prediction here.
                    if self.predictions.len() >= MAX_LIVE {
                        self.predictions.clear();
                    }
                    self.predictions.insert(request, (u32::try_from(tokens).unwrap_or(u32::MAX), seq));
                }
            }
            Record::Arrived { id } => step.lives.push(Life::Arrived { id }),
            Record::Started { request, id, prompt_tokens, cached_tokens, predicted } => {
                let (predicted_tokens, seq) = match self.predictions.remove(&request).filter(|_| predicted) {
                    Some((tokens, seq)) => (Some(tokens), seq),
                    None => (None, 0),
                };
                step.lives.push(Life::Started { id, prompt_tokens, cached_tokens, predicted_tokens, seq });
            }
            Record::Finished { request, id, reason } => {
                self.predictions.remove(&request);
                step.lives.push(Life::Finished { id, reason });
            }
            Record::Used { running, waiting } => self.adapters.used(running, waiting),
            Record::Ran { adapters } => self.adapters.ran(adapters.iter().map(String::as_str)),
            Record::Adapter { doing, adapter } => self.adapters.done(doing, &adapter),
        }
    }

    /// To be called when a step's changes were told: forgets the names of roots that have no block left, and makes the
    /// lists of adapters anew if they changed.
    pub fn told(&mut self) {
        self.adapters.refresh();
        if std::mem::take(&mut self.lost_roots) {
            self.roots.retain(|_, root| root.copies > 0);
        }
    }

    fn add(
        &mut self,
        block: u64,
        (group, partial): (u32, bool),
        fp: Fingerprint,
        (parent, adapter): (Link, &str),
        step: &mut Step,
    ) {
        let Some(first) = self.held.get_mut(block as usize) else { return };
        let mut held = Held { fp, root: 0, group, partial, unnamed: false };
        if let Link::Root(root) = parent
            && !adapter.is_empty()
        {
            held.root = root;
            let name = || RootName { adapter: adapter.to_string(), copies: 0 };
            self.roots.entry(root).or_insert_with(name).copies += 1;
        }
        if first.fp == 0 && !first.unnamed {
            *first = held;
        } else {
            self.more.entry(block).or_default().push(held);
        }
        self.sets.add(group, fp, parent, partial, &mut step.changes);
    }

    fn empty(&mut self, block: u64, step: &mut Step) {
        let Some(first) = self.held.get_mut(block as usize).map(std::mem::take) else { return };
        if first.unnamed {
            self.unnamed -= 1;
        }
        let more = if self.more.is_empty() { None } else { self.more.remove(&block) };
        for held in std::iter::once(first).chain(more.into_iter().flatten()).filter(|held| held.fp != 0) {
            if let Some(root) = self.roots.get_mut(&held.root).filter(|_| held.root != 0) {
                root.copies -= 1;
                self.lost_roots |= root.copies == 0;
            }
            self.sets.drop(held.group, held.fp, held.partial, &mut step.changes);
        }
    }
}
