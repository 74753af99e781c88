//! The inside of a simulated engine: a pool of physical blocks used as vLLM uses its own, with the real agent told of
//! everything that happens to it.
//!
//! As in vLLM: a hit is the longest run of cached blocks, never the whole prompt; blocks get keys when their tokens are
//! scheduled; freed blocks keep their keys, wait in a queue, least recently used first and the tail of a request before
//! its head, and are evicted only when they are handed out again; two copies of one block can be there at once.

use agent::engine::{Engine, Request};
use agent::{Counts, Facts};
use proto::block::{self, Namespace};
use std::collections::{BTreeMap, HashMap};

/// A physical block.
#[derive(Debug, Clone, Default)]
struct Physical {
    /// The simulated engine's own name of what it holds; none while it is not full.
    key: Option<u64>,
    /// Live requests that use it.
    users: u32,
    /// Its place in the queue of free blocks, when it is there.
    queued: Option<u64>,
}

/// A live request.
#[derive(Debug)]
struct Live {
    tokens: Vec<u32>,
    prompt_tokens: usize,
    root: u64,
    keys: Vec<u64>,
    blocks: Vec<u32>,
    /// Leading blocks that have their key.
    keyed: usize,
    /// Blocks promised to it: those of its longest answer.
    promised: usize,
}

/// Why a request cannot run, now or ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotStarted {
    /// It does not fit the pool.
    #[error("{needed} blocks are needed and the pool has {pool}")]
    TooLong {
        /// Blocks of prompt and longest answer.
        needed: usize,
        /// Blocks there are.
        pool: usize,
    },
    /// Other requests use the blocks: try again when one has finished.
    #[error("the pool is in use")]
    Later,
}

/// The pool, the live requests, and the agent.
#[derive(Debug)]
pub struct SimEngine {
    agent: Engine,
    model: String,
    block_size: usize,
    pool: Vec<Physical>,
    cached: HashMap<u64, Vec<u32>>,
    /// Free blocks by age, the next to be handed out first.
    free: BTreeMap<u64, u32>,
    age: u64,
    live: HashMap<String, Live>,
    waiting: u32,
    promised: usize,
}

/// The engine's own hashing has nothing to do with the deployment's seed.
const ENGINE_SEED: u64 = 0x0005_1e57_0e11;

impl SimEngine {
    /// An engine with an empty pool; `agent` was started with the same `facts`.
    pub fn new(agent: Engine, facts: &Facts) -> SimEngine {
        let total = facts.total_blocks;
        SimEngine {
            agent,
            model: facts.models.first().cloned().unwrap_or_default(),
            block_size: facts.block_size as usize,
            pool: (0..total).map(|n| Physical { queued: Some(u64::from(n)), ..Physical::default() }).collect(),
            cached: HashMap::new(),
            free: (0..total).map(|n| (u64::from(n), n)).collect(),
            age: u64::from(total),
            live: HashMap::new(),
            waiting: 0,
            promised: 0,
        }
    }

    /// Requests that run.
    pub fn running(&self) -> usize {
        self.live.len()
    }

    /// Requests that wait for blocks.
    pub fn waiting(&self) -> u32 {
        self.waiting
    }

    /// A request came in; it waits until [`SimEngine::start`] succeeds, or [`SimEngine::give_up`].
    pub fn arrive(&mut self, id: &str, tokens: &[u32], adapter: &str, salt: &str) {
        self.waiting += 1;
        let request = Request { id, tokens, prompt_tokens: tokens.len(), adapter, adapter_path: "", salt };
        self.agent.arrived(&request, vec![], usize::MAX);
        self.report();
    }

    /// A waiting request goes away unserved.
    pub fn give_up(&mut self, id: &str) {
        self.waiting = self.waiting.saturating_sub(1);
        self.agent.finished(id, "abort");
        self.report();
    }

    /// Schedules the whole prompt of a waiting request; gives the tokens taken from cache.
    ///
    /// # Errors
    /// When there are not enough blocks, now or ever. It waits on.
    pub fn start(
        &mut self,
        id: &str,
        tokens: &[u32],
        adapter: &str,
        salt: &str,
        max_tokens: usize,
    ) -> Result<usize, NotStarted> {
        let promised = (tokens.len() + max_tokens).div_ceil(self.block_size);
        if promised > self.pool.len() {
            return Err(NotStarted::TooLong { needed: promised, pool: self.pool.len() });
        }
        // Counted without what it shares with others: cautious, so that no running request ever lacks a block.
        if self.promised + promised > self.pool.len() {
            return Err(NotStarted::Later);
        }
        self.promised += promised;
        self.waiting = self.waiting.saturating_sub(1);
        let root = block::root(Namespace { model: &self.model, adapter, salt }, ENGINE_SEED);
        let keys = block::chain(root, self.block_size, tokens);
        let cap = tokens.len().saturating_sub(1) / self.block_size;
        let hit: Vec<u32> = keys.iter().take(cap).map_while(|key| self.cached.get(key)?.first().copied()).collect();
        let cached_tokens = hit.len() * self.block_size;
        self.agent.looked_up(id, tokens, tokens.len(), cached_tokens, false);
        let hits: Vec<Option<u32>> = hit.iter().map(|block| Some(*block)).collect();
        self.agent.hit(id, tokens, 0, &hits);
        for block in &hit {
            self.take(*block);
        }
        let keyed = hit.len();
        let live =
            Live { tokens: tokens.to_vec(), prompt_tokens: tokens.len(), root, keys, blocks: hit, keyed, promised };
        self.live.insert(id.to_owned(), live);
        self.schedule(id, tokens.len());
        self.agent.started(id);
        self.agent.progressed(id, (tokens.len() - cached_tokens) as u32);
        self.step();
        Ok(cached_tokens)
    }

    /// A token was sampled. The one before it is computed now.
    pub fn sampled(&mut self, id: &str, token: u32) {
        let Some(live) = self.live.get_mut(id) else { return };
        let computed = live.tokens.len();
        live.tokens.push(token);
        self.schedule(id, computed);
        self.step();
    }

    /// A running request ended: its blocks are free, and keep what they hold.
    pub fn finish(&mut self, id: &str, reason: &str) {
        let Some(live) = self.live.remove(id) else { return };
        self.promised -= live.promised;
        for block in live.blocks.iter().rev() {
            let physical = &mut self.pool[*block as usize];
            physical.users -= 1;
            if physical.users == 0 {
                physical.queued = Some(self.age);
                self.free.insert(self.age, *block);
                self.age += 1;
            }
        }
        self.agent.finished(id, reason);
        self.step();
    }

    /// Empties the cache, as `/reset_prefix_cache` does. False while requests run.
    pub fn reset(&mut self) -> bool {
        if !self.live.is_empty() {
            return false;
        }
        self.cached.clear();
        self.pool.iter_mut().for_each(|physical| physical.key = None);
        self.agent.cleared();
        true
    }

    /// Gives a request blocks for its first `computed` tokens, and keys to those that are full.
    fn schedule(&mut self, id: &str, computed: usize) {
        let Some(mut live) = self.live.remove(id) else { return };
        let mut handed_out = vec![];
        while live.blocks.len() < computed.div_ceil(self.block_size) {
            // Never empty: what all running requests can need was promised when they started.
            let Some((_, block)) = self.free.pop_first() else { break };
            let physical = &mut self.pool[block as usize];
            let key = physical.key.take();
            (physical.users, physical.queued) = (1, None);
            if let Some(key) = key {
                self.forget(key, block);
            }
            handed_out.push(block);
            live.blocks.push(block);
        }
        self.agent.evicted(handed_out.into_iter());
        let full = computed / self.block_size;
        if full > live.keyed {
            let parent = live.keys.last().copied().unwrap_or(live.root);
            let from = live.keys.len() * self.block_size;
            block::chain_into(parent, self.block_size, &live.tokens[from..full * self.block_size], &mut live.keys);
            let fresh: Vec<Option<u32>> = live.blocks[live.keyed..full].iter().map(|block| Some(*block)).collect();
            for (block, key) in fresh.iter().flatten().zip(&live.keys[live.keyed..full]) {
                self.pool[*block as usize].key = Some(*key);
                self.cached.entry(*key).or_default().push(*block);
            }
            self.agent.cached(id, &live.tokens[..], 0, live.keyed, &fresh);
            live.keyed = full;
        }
        self.live.insert(id.to_owned(), live);
    }

    /// One more request uses a block that is cached.
    fn take(&mut self, block: u32) {
        let physical = &mut self.pool[block as usize];
        physical.users += 1;
        if let Some(age) = physical.queued.take() {
            self.free.remove(&age);
        }
    }

    /// One copy less of a key.
    fn forget(&mut self, key: u64, block: u32) {
        if let Some(copies) = self.cached.get_mut(&key) {
            copies.retain(|copy| *copy != block);
            if copies.is_empty() {
                self.cached.remove(&key);
            }
        }
    }

    fn step(&mut self) {
        self.report();
        self.agent.step_ended();
    }

    fn report(&mut self) {
        let used = self.pool.len() - self.free.len();
        self.agent.counts(Counts {
            running: self.live.len() as u32,
            waiting: self.waiting,
            backlog_tokens: 0,
            kv_use: used as f32 / self.pool.len().max(1) as f32,
        });
    }

    /// Prompt and answer tokens of a running request.
    pub fn usage(&self, id: &str) -> Option<(usize, usize)> {
        let live = self.live.get(id)?;
        Some((live.prompt_tokens, live.tokens.len() - live.prompt_tokens))
    }

    /// What is cached: block ids with their keys, for an audit.
    pub fn audit(&self) -> Vec<(u64, Vec<u8>)> {
        let keyed = (0u64..).zip(&self.pool).filter_map(|(block, physical)| Some((block, physical.key?)));
        keyed.map(|(block, key)| (block, key.to_be_bytes().to_vec())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use agent::engine::Gauges;
    use agent::ring;
    use std::sync::Arc;

    fn engine(blocks: u32) -> SimEngine {
        let facts = Facts::plain("tiny", 4, blocks);
        // Nobody reads this ring: a full one costs the agent its news, never the engine its life.
        let (writer, _reader) = ring::for_pool(blocks as usize);
        let agent = Engine::new(&facts, "tiny", 7, writer, Arc::new(Gauges::default()), Box::new(|| ()));
        SimEngine::new(agent, &facts)
    }

    fn run(engine: &mut SimEngine, id: &str, tokens: &[u32], answer: u32) -> usize {
        engine.arrive(id, tokens, "", "");
        let cached = engine.start(id, tokens, "", "", answer as usize).expect("room");
        (0..answer).for_each(|n| engine.sampled(id, 900 + n));
        engine.finish(id, "stop");
        cached
    }

    #[test]
    fn a_prompt_is_never_wholly_taken_from_cache() {
        let mut engine = engine(16);
        let tokens: Vec<u32> = (0..8).collect();
        assert_eq!(run(&mut engine, "a", &tokens, 1), 0);
        assert_eq!(run(&mut engine, "b", &tokens, 1), 4);
        // The last block was computed again: two copies of it.
        assert_eq!(engine.audit().len(), 3);
    }

    #[test]
    fn answers_are_cached_without_their_last_token() {
        let mut engine = engine(16);
        let tokens: Vec<u32> = (0..6).collect();
        run(&mut engine, "a", &tokens, 3);
        let mut next = tokens.clone();
        next.extend([900, 901, 902, 1, 2]);
        assert_eq!(run(&mut engine, "b", &next, 1), 8);
        assert_eq!((engine.running(), engine.waiting(), engine.promised), (0, 0, 0));
    }

    #[test]
    fn the_oldest_tail_is_evicted_first() {
        let mut engine = engine(6);
        let one: Vec<u32> = (0..12).collect();
        let other: Vec<u32> = (100..115).collect();
        run(&mut engine, "a", &one, 1);
        // Four blocks for the other: three were never used, the fourth is the tail of the first.
        run(&mut engine, "b", &other, 1);
        let mut longer = one.clone();
        longer.push(1);
        assert_eq!(run(&mut engine, "c", &longer, 1), 8);
    }

    #[test]
    fn namespaces_share_nothing() {
        let mut engine = engine(32);
        let tokens: Vec<u32> = (0..9).collect();
        for (adapter, salt, cached) in [("", "", 0), ("x", "", 0), ("", "s", 0), ("", "", 8), ("x", "", 8)] {
            engine.arrive("a", &tokens, adapter, salt);
            assert_eq!(engine.start("a", &tokens, adapter, salt, 1), Ok(cached), "{adapter:?} {salt:?}");
            engine.finish("a", "stop");
        }
        assert!(engine.reset());
        assert_eq!(run(&mut engine, "b", &tokens, 1), 0);
    }

    #[test]
    fn requests_wait_for_blocks_or_are_refused() {
        let mut engine = engine(4);
        let tokens: Vec<u32> = (0..12).collect();
        engine.arrive("a", &tokens, "", "");
        assert_eq!(engine.start("a", &tokens, "", "", 5), Err(NotStarted::TooLong { needed: 5, pool: 4 }));
        assert_eq!(engine.start("a", &tokens, "", "", 4), Ok(0));
        engine.arrive("b", &tokens, "", "");
        assert_eq!(engine.start("b", &tokens, "", "", 1), Err(NotStarted::Later));
        engine.finish("a", "stop");
        assert_eq!(engine.start("b", &tokens, "", "", 1), Ok(8));
    }
}
