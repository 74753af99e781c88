//! The publisher's side of the truth: the engine's records in, changes of the reachable set out.

use crate::record::Record;
use proto::block::{Fingerprint, cached_tokens};
use proto::event::Life;
use proto::residency::{Change, FingerprintMap, Link, Residency};
use std::collections::{HashMap, VecDeque};

/// What one publisher step gathered.
#[derive(Debug, Default)]
pub struct Step {
    /// The set was emptied before the changes.
    pub cleared: bool,
    /// Changes of the reachable set, in order.
    pub changes: Vec<Change>,
    /// Steps in the lives of requests.
    pub lives: Vec<Life>,
}

impl Step {
    /// Nothing happened.
    pub fn is_empty(&self) -> bool {
        !self.cleared && self.changes.is_empty() && self.lives.is_empty()
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Held {
    // 0: empty. UNNAMED: cached, unknown.
    fp: Fingerprint,
    // The root that it follows, where its adapter's name is kept; 0 otherwise.
    root: Fingerprint,
    unnamed: bool,
}

#[derive(Debug)]
struct RootName {
    adapter: String,
    copies: u64,
}

#[derive(Debug, Default)]
struct Adapters {
    // Request -> adapter, of requests that have one. As many as are live.
    waiting: HashMap<u64, String>,
    running: HashMap<u64, String>,
    // Last ones that ran: thought loaded.
    recent: VecDeque<String>,
}

/// The reachable set of one engine's GPU tier.
#[derive(Debug)]
pub struct Follower {
    block_size: usize,
    max_adapters: usize,
    held: Vec<Held>,
    residency: Residency,
    // Roots of adapters: as many as have a copy, and those that lost theirs in this step.
    roots: FingerprintMap<RootName>,
    lost_roots: bool,
    // Predictions of requests that were looked up and have not started: as many as wait.
    predictions: HashMap<u64, (u32, u64)>,
    adapters: Adapters,
    unnamed: u64,
}

impl Follower {
    /// Follows a pool of `blocks` blocks.
    pub fn new(block_size: usize, blocks: usize, max_adapters: usize) -> Self {
        Self {
            block_size,
            max_adapters,
            held: vec![Held::default(); blocks],
            residency: Residency::new(),
            roots: FingerprintMap::default(),
            lost_roots: false,
            predictions: HashMap::new(),
            adapters: Adapters::default(),
            unnamed: 0,
        }
    }

    /// The reachable set.
    pub fn residency(&self) -> &Residency {
        &self.residency
    }

    /// Cached blocks without a name.
    pub fn unnamed(&self) -> u64 {
        self.unnamed
    }

    /// The adapter of a root, "" for none.
    pub fn adapter(&self, root: Fingerprint) -> &str {
        self.roots.get(&root).map_or("", |root| &root.adapter)
    }

    /// Adapters that run or are thought loaded, and those that waiting requests ask for; sorted.
    pub fn adapters(&self) -> (Vec<String>, Vec<String>) {
        let sorted = |mut list: Vec<String>| {
            list.sort_unstable();
            list.dedup();
            list.truncate(proto::event::MAX_LIST);
            list
        };
        let mut running: Vec<String> = self.adapters.running.values().cloned().collect();
        running.sort_unstable();
        running.dedup();
        let room = self.max_adapters.saturating_sub(running.len());
        let recent: Vec<String> =
            self.adapters.recent.iter().filter(|a| !running.contains(a)).take(room).cloned().collect();
        running.extend(recent);
        (sorted(running), sorted(self.adapters.waiting.values().cloned().collect()))
    }

    /// Applies one record.
    pub fn apply(&mut self, record: Record<'_>, step: &mut Step) {
        match record {
            Record::Stored { parent, adapter, pairs } => self.store(parent, adapter, pairs, step),
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
                self.residency.clear();
                self.roots.clear();
                self.unnamed = 0;
                step.changes.clear();
                step.cleared = true;
            }
            Record::Looked { request, seq, tokens, prompt } => {
                let depth = self.residency.depth(prompt);
                let tokens = cached_tokens(depth, self.block_size, tokens as usize);
                self.predictions.insert(request, (u32::try_from(tokens).unwrap_or(u32::MAX), seq));
            }
            Record::Arrived { request, id, adapter } => {
                if !adapter.is_empty() {
                    self.adapters.waiting.insert(request, adapter);
                }
                step.lives.push(Life::Arrived { id });
            }
            Record::Started { request, id, prompt_tokens, cached_tokens } => {
                if let Some(adapter) = self.adapters.waiting.remove(&request) {
                    self.adapters.recent.retain(|recent| *recent != adapter);
                    self.adapters.recent.push_front(adapter.clone());
                    self.adapters.recent.truncate(self.max_adapters);
                    self.adapters.running.insert(request, adapter);
                }
                let (predicted_tokens, seq) = match self.predictions.remove(&request) {
                    Some((tokens, seq)) => (Some(tokens), seq),
                    None => (None, 0),
                };
                step.lives.push(Life::Started { id, prompt_tokens, cached_tokens, predicted_tokens, seq });
            }
            Record::Finished { request, id, reason } => {
                self.predictions.remove(&request);
                self.adapters.waiting.remove(&request);
                self.adapters.running.remove(&request);
                step.lives.push(Life::Finished { id, reason });
            }
        }
    }

    /// To be called when a step's changes were told: forgets the names of roots that have no block left.
    pub fn told(&mut self) {
        if std::mem::take(&mut self.lost_roots) {
            self.roots.retain(|_, root| root.copies > 0);
        }
    }

    fn store(&mut self, parent: Link, adapter: String, pairs: &[u64], step: &mut Step) {
        let mut before = parent;
        for pair in pairs.chunks_exact(2) {
            let (block, fp) = (pair[0], pair[1]);
            self.empty(block, step);
            if let Some(held) = self.held.get_mut(block as usize) {
                held.fp = fp;
                if let Link::Root(root) = before
                    && !adapter.is_empty()
                {
                    held.root = root;
                    let name = || RootName { adapter: adapter.clone(), copies: 0 };
                    self.roots.entry(root).or_insert_with(name).copies += 1;
                }
                self.residency.add(fp, before, &mut step.changes);
            }
            before = Link::Block(fp);
        }
    }

    fn empty(&mut self, block: u64, step: &mut Step) {
        let Some(held) = self.held.get_mut(block as usize).map(std::mem::take) else { return };
        if held.unnamed {
            self.unnamed -= 1;
        }
        if held.root != 0
            && let Some(root) = self.roots.get_mut(&held.root)
        {
            root.copies -= 1;
            self.lost_roots |= root.copies == 0;
        }
        if held.fp != 0 {
            self.residency.drop(held.fp, &mut step.changes);
        }
    }
}
