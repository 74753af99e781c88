//! The agent without sockets: whatever the engine does, and however long the publisher sleeps, what is published is
//! what the pool holds, and what is predicted is what the engine took.

use agent::Facts;
use agent::engine::{Engine, Gauges, Request};
use agent::feed::Feed;
use agent::ring;
use agent::state::Identity;
use harness::naive::{self, Copies};
use harness::seeded::Seeded;
use proto::block::{self, Fingerprint, Namespace};
use proto::event::{Batch, Life, Op, Parent};
use proto::id::Epoch;
use proto::residency::{Change, Link};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const BLOCK: usize = 4;
const BLOCKS: usize = 80;
const SEED: u64 = 5;

/// A pool of blocks that does what vLLM's does, and the agent beside it.
struct World {
    dice: Seeded,
    engine: Engine,
    feed: Feed,
    pool: Vec<Option<(Fingerprint, Link)>>,
    live: Vec<(String, Vec<u32>)>,
    made: usize,
    now_ms: u64,
    // What a reader has.
    next: u64,
    set: BTreeSet<Fingerprint>,
    parents: BTreeMap<Fingerprint, Link>,
    delivered: BTreeMap<String, usize>,
    predicted: usize,
    unpredicted: usize,
}

impl World {
    fn new(seed: u64) -> Self {
        let facts = Facts::plain("m", BLOCK as u32, BLOCKS as u32);
        let gauges = Arc::new(Gauges::default());
        let (writer, reader) = ring::for_pool(BLOCKS);
        let identity = Identity::new("a", Epoch { start_ms: 1, random: 2 }, &facts, None, SEED);
        Self {
            dice: Seeded::new(seed),
            engine: Engine::new(&facts, "m", SEED, writer, gauges.clone(), Box::new(|| {})),
            feed: Feed::new(identity, facts, reader, gauges, 100),
            pool: vec![None; BLOCKS],
            live: vec![],
            made: 0,
            now_ms: 0,
            next: 0,
            set: BTreeSet::new(),
            parents: BTreeMap::new(),
            delivered: BTreeMap::new(),
            predicted: 0,
            unpredicted: 0,
        }
    }

    /// A request arrives, is looked up, gets blocks and is cached: 1 to 12 blocks, often with a common beginning.
    fn request(&mut self) {
        let id = format!("r{}", self.made);
        self.made += 1;
        let origin = self.dice.below(4) as u32 * 1000;
        let mut tokens: Vec<u32> = (origin..).take(1 + self.dice.below(48)).collect();
        if self.dice.percent(50) {
            let at = self.dice.below(tokens.len());
            tokens[at] = self.dice.below(1000) as u32;
        }
        let (adapter, salt) = (*self.dice.pick(&["", "", "x"]), *self.dice.pick(&["", "", "s"]));
        let request =
            Request { id: &id, tokens: &tokens[..], prompt_tokens: tokens.len(), adapter, adapter_path: "", salt };
        self.engine.arrived(&request, vec![], usize::MAX);

        let root = block::root(Namespace { model: "m", adapter, salt }, SEED);
        let names = block::chain(root, BLOCK, &tokens);
        let cap = (tokens.len() - 1) / BLOCK;
        let held = |fp: &Fingerprint| self.pool.iter().flatten().any(|(held, _)| held == fp);
        let hit = names[..cap].iter().take_while(|fp| held(fp)).count();
        self.engine.looked_up(&id, &tokens[..], tokens.len(), hit * BLOCK, false);
        self.delivered.insert(id.clone(), hit * BLOCK);

        // Any blocks may be handed out but those that were hit.
        let taken = |block: &usize| self.pool[*block].is_some_and(|(held, _)| names[..hit].contains(&held));
        let mut free: Vec<usize> = (0..BLOCKS).filter(|block| !taken(block)).collect();
        let mut blocks = vec![];
        for _ in hit..names.len() {
            blocks.push(free.swap_remove(self.dice.below(free.len())));
        }
        self.engine.evicted(blocks.iter().map(|block| *block as u32));
        for (at, block) in (hit..).zip(&blocks) {
            let parent = if at == 0 { Link::Root(root) } else { Link::Block(names[at - 1]) };
            self.pool[*block] = Some((names[at], parent));
            self.parents.insert(names[at], parent);
        }
        let blocks: Vec<Option<u32>> = blocks.iter().map(|block| Some(*block as u32)).collect();
        self.engine.cached(&id, &tokens[..], 0, hit, &blocks);
        self.engine.started(&id);
        self.live.push((id, tokens));
    }

    fn step(&mut self) {
        match self.dice.below(100) {
            0 => {
                self.pool.fill(None);
                self.engine.cleared();
            }
            1..30 => {
                let block = self.dice.below(BLOCKS);
                self.pool[block] = None;
                self.engine.evicted([block as u32].into_iter());
            }
            30..60 if !self.live.is_empty() => {
                let (id, _) = self.live.swap_remove(self.dice.below(self.live.len()));
                self.engine.finished(&id, "stop");
            }
            _ => self.request(),
        }
        self.engine.step_ended();
    }

    /// The publisher runs, and the reader applies what it says.
    fn publish(&mut self) {
        self.now_ms += 30;
        self.feed.publish(self.now_ms, 0, "");
        while let Some(payload) = self.feed.replay().get(self.next).cloned() {
            self.next += 1;
            let batch = Batch::decode(&payload).unwrap_or_else(|error| panic!("seq {}: {error}", self.next - 1));
            batch.ops.iter().for_each(|op| self.apply(op));
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Store(store) => {
                let mut parent = match &store.parent {
                    Parent::Block(fp) => Link::Block(*fp),
                    Parent::Loose => panic!("a closed set without parents"),
                    Parent::Root { fp, model, adapter } => {
                        let named = ["", "s"].map(|salt| block::root(Namespace { model, adapter, salt }, SEED));
                        assert!(named.contains(fp), "the root {fp:x} has another adapter than {adapter:?}");
                        Link::Root(*fp)
                    }
                };
                for fp in &store.fingerprints.0 {
                    naive::apply(&mut self.set, &self.parents, Change::Added { parent, fp: *fp });
                    parent = Link::Block(*fp);
                }
            }
            Op::Remove(remove) => {
                for fp in &remove.fingerprints.0 {
                    naive::apply(&mut self.set, &self.parents, Change::Removed { fp: *fp });
                }
            }
            Op::Clear(_) => self.set.clear(),
            Op::State(state) => assert_eq!(state.digests[0].digest, self.set.iter().copied().collect()),
            Op::Life(Life::Started { id, cached_tokens, predicted_tokens, .. }) => {
                let delivered = self.delivered.remove(id).map(|tokens| tokens as u32);
                assert_eq!(Some(*cached_tokens), delivered, "{id}");
                match predicted_tokens {
                    Some(tokens) => {
                        assert_eq!(Some(*tokens), delivered, "the prediction of {id}");
                        self.predicted += 1;
                    }
                    None => self.unpredicted += 1,
                }
            }
            Op::Life(_) => {}
        }
    }

    fn check(&mut self) {
        self.publish();
        let mut copies = Copies::default();
        self.pool.iter().flatten().for_each(|(fp, parent)| copies.add(*fp, *parent));
        assert_eq!(self.set, copies.reachable());
        assert_eq!(
            self.feed.follower().sets().digests().next().map(|(_, digest)| digest.count),
            Some(self.set.len() as u64)
        );
    }
}

/// Runs with the seed in the message of every failure.
fn with_seed(seed: u64, run: impl FnOnce(&mut World) + std::panic::UnwindSafe) {
    let outcome = std::panic::catch_unwind(|| run(&mut World::new(seed)));
    assert!(outcome.is_ok(), "seed {seed}");
}

#[test]
fn the_set_and_every_prediction_are_exact() {
    for seed in 0..30 {
        with_seed(seed, |world| {
            for turn in 0..300 {
                world.step();
                if world.dice.percent(30) {
                    world.publish();
                }
                if turn % 20 == 0 {
                    world.check();
                }
            }
            world.check();
            assert!(world.predicted > 50 && world.unpredicted == 0);
        });
    }
}

#[test]
fn a_publisher_that_slept_too_long_finds_the_truth_all_the_same() {
    for seed in 100..103 {
        with_seed(seed, |world| {
            for _ in 0..2 {
                // The ring has 65,536 words; this writes about 300,000.
                (0..6000).for_each(|_| world.step());
                // What was owed is told with the next steps, as there is room again.
                world.publish();
                world.step();
                world.check();
                // Lives that found no room are lost: the only trace that a full ring leaves.
                assert!(!world.delivered.is_empty(), "the ring was never full");
                world.delivered.clear();
                let unpredicted = world.unpredicted;
                (0..100).for_each(|_| world.step());
                world.check();
                assert_eq!(world.unpredicted, unpredicted, "predictions are back");
            }
            assert!(world.predicted > 500);
        });
    }
}

#[test]
fn a_lookup_by_a_connectors_rules_takes_an_earlier_prediction_away() {
    with_seed(8, |world| {
        let tokens: Vec<u32> = (90_000..90_040).collect();
        for (id, elsewhere) in [("here", false), ("elsewhere", true)] {
            let request =
                Request { id, tokens: &tokens[..], prompt_tokens: 40, adapter: "", adapter_path: "", salt: "" };
            world.engine.arrived(&request, vec![], usize::MAX);
            world.engine.looked_up(id, &tokens[..], 40, 0, false); // and it did not fit
            if elsewhere {
                world.engine.looked_up_elsewhere(id, 32);
            }
            world.delivered.insert(id.to_string(), if elsewhere { 32 } else { 0 });
            world.engine.started(id);
            world.engine.step_ended();
            world.check();
            assert_eq!((world.predicted, world.unpredicted), (1, usize::from(elsewhere)));
        }
    });
}

#[test]
fn what_a_failed_hook_missed_is_not_published_until_a_request_names_it() {
    with_seed(7, |world| {
        (0..200).for_each(|_| world.step());
        world.check();
        let cached: Vec<u32> = (0..BLOCKS as u32).filter(|block| world.pool[*block as usize].is_some()).collect();
        world.engine.lose(cached.iter().copied());
        world.publish();
        assert_eq!((world.set.len(), world.feed.follower().unnamed()), (0, cached.len() as u64));
        assert_eq!(world.engine.lost(), cached.len());
        // Handed out or evicted, they are lost no more.
        world.engine.evicted(cached.iter().copied());
        world.pool.fill(None);
        world.check();
        assert_eq!((world.engine.lost(), world.feed.follower().unnamed()), (0, 0));
        (0..200).for_each(|_| world.step());
        world.check();
    });
}
