//! The core of the index, one thread, against a plain model: maps of sets. Random closed workloads over holders that
//! come, are published, cleared, retired, swept and come again, while the table grows and shrinks.

use harness::seeded::Seeded;
use index::shared::{Held, Holder, Limits, Reader, Refused, Stats, Writer, open};
use proto::digest::Digest;
use proto::id::SetKind;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// A forest of prompts: each node's path is a prompt.
struct Forest {
    /// (fingerprint, parent's place); the place of a parent is lower.
    nodes: Vec<(u64, Option<usize>)>,
    children: Vec<Vec<usize>>,
}

impl Forest {
    fn grow(rng: &mut Seeded, nodes: usize, trunk: usize) -> Forest {
        let mut forest = Forest { nodes: vec![], children: vec![] };
        for at in 0..nodes {
            // A trunk, then mostly chains, sometimes branches, sometimes new roots.
            let parent = match (at, rng.below(20)) {
                (0, _) => None,
                (at, _) if at < trunk => Some(at - 1),
                (_, 0) => None,
                (at, 1..4) => Some(rng.below(at)),
                (at, _) => Some(at - 1),
            };
            // Small numbers too: nothing may rest on fingerprints being spread.
            let fingerprint = if rng.below(8) == 0 { at as u64 + 1 } else { rng.word() | 1 << 63 };
            forest.nodes.push((fingerprint, parent));
            forest.children.push(vec![]);
            parent.into_iter().for_each(|parent| forest.children[parent].push(at));
        }
        forest
    }

    fn path(&self, mut at: usize) -> Vec<u64> {
        let mut path = vec![self.nodes[at].0];
        while let Some(parent) = self.nodes[at].1 {
            path.push(self.nodes[parent].0);
            at = parent;
        }
        path.reverse();
        path
    }

    /// The node and all below it, deepest first.
    fn subtree(&self, at: usize) -> Vec<u64> {
        let (mut order, mut next) = (vec![at], 0);
        while next < order.len() {
            order.extend(&self.children[order[next]]);
            next += 1;
        }
        order.iter().rev().map(|at| self.nodes[*at].0).collect()
    }
}

struct Model {
    holders: BTreeMap<usize, (Holder, Held, bool, HashSet<u64>)>,
    next: usize,
}

struct World {
    seed: u64,
    rng: Seeded,
    forest: Forest,
    writer: Writer,
    reader: Reader,
    model: Model,
    engines: u32,
}

impl World {
    fn new(seed: u64, engines: u32, nodes: usize) -> World {
        let mut rng = Seeded::new(seed);
        let forest = Forest::grow(&mut rng, nodes, nodes / 10);
        let (writer, reader) = open(Limits { engines, holders: engines * 5 + 8, spread: rng.word() });
        World { seed, rng, forest, writer, reader, model: Model { holders: BTreeMap::new(), next: 0 }, engines }
    }

    fn any_holder(&mut self) -> Option<usize> {
        let at = self.rng.below(self.model.holders.len().max(1));
        self.model.holders.keys().nth(at).copied()
    }

    fn open(&mut self) {
        let held = Held { engine: self.rng.below(self.engines as usize) as u32, kind: SetKind::ALL[self.rng.below(4)] };
        match self.writer.open(held.engine, held.kind) {
            Ok(holder) => {
                self.model.holders.insert(self.model.next, (holder, held, false, HashSet::new()));
                self.model.next += 1;
            }
            Err(refused) => assert!(matches!(refused, Refused::NoHolderLeft { .. }), "seed {}: {refused}", self.seed),
        }
    }

    fn publish(&mut self, key: usize) {
        let (holder, held, was_live, _) = self.model.holders[&key];
        let old = self.model.holders.iter().find(|(_, h)| h.1 == held && h.2).map(|(key, h)| (*key, h.0));
        let expected = old.filter(|_| !was_live).map(|old| old.1);
        assert_eq!(self.writer.publish(holder), Ok(expected), "seed {}", self.seed);
        old.filter(|_| !was_live).into_iter().for_each(|(key, _)| drop(self.model.holders.remove(&key)));
        self.model.holders.get_mut(&key).into_iter().for_each(|h| h.2 = true);
    }

    fn step(&mut self) {
        let Some(key) = self.any_holder() else { return self.open() };
        let node = self.rng.below(self.forest.nodes.len());
        let (seed, kind) = (self.seed, self.model.holders[&key].1.kind);
        match self.rng.below(100) {
            0..5 => self.open(),
            5..10 => self.publish(key),
            10..12 => {
                let Some(gone) = self.model.holders.remove(&key) else { return };
                assert_eq!(self.writer.retire(gone.0), Ok(()), "seed {seed}");
                let dead = Refused::Retired { number: 0, generation: 0 };
                let store = self.writer.store(gone.0, &[1]).map_err(|_| dead);
                assert_eq!(store, Err(dead), "seed {seed}: a retired handle works");
            }
            12..14 => {
                let Ok(new) = self.writer.clear(self.model.holders[&key].0) else { return };
                let holder = self.model.holders.get_mut(&key);
                holder.into_iter().for_each(|h| (h.0, h.3) = (new, HashSet::new()));
            }
            14..24 => drop(self.writer.sweep(500)),
            24..70 => {
                // Sets that are not closed take any part of a path; closed ones a whole path, some of it known already.
                let mut path = self.forest.path(node);
                if !kind.closed() {
                    path.retain(|_| self.rng.below(3) == 0);
                }
                let Some(holder) = self.model.holders.get_mut(&key) else { return };
                let new = path.iter().filter(|fp| holder.3.insert(**fp)).count() as u64;
                let changed = self.writer.store(holder.0, &path).map(|c| (c.changed, c.unchanged));
                assert_eq!(changed, Ok((new, path.len() as u64 - new)), "seed {seed}");
            }
            _ => {
                let gone = self.forest.subtree(node);
                let Some(holder) = self.model.holders.get_mut(&key) else { return };
                let real = gone.iter().filter(|fp| holder.3.remove(fp)).count() as u64;
                let changed = self.writer.remove(holder.0, &gone).map(|c| (c.changed, c.unchanged));
                assert_eq!(changed, Ok((real, gone.len() as u64 - real)), "seed {seed}");
            }
        }
    }

    /// Equal answers for a prompt.
    fn check(&mut self, prompt: &[u64]) {
        let live = || self.model.holders.values().filter(|h| h.2);
        let depth = |set: &HashSet<u64>| prompt.iter().take_while(|fp| set.contains(fp)).count() as u32;
        let closed = live().filter(|h| h.1.kind.closed());
        let expected: BTreeSet<(Held, u32)> = closed.map(|h| (h.1, depth(&h.3))).filter(|h| h.1 > 0).collect();
        let answer = self.reader.find(prompt);
        let found: Vec<(Held, u32)> = answer.iter().collect();
        assert!(found.is_sorted_by_key(|found| found.1), "seed {}: {found:?}", self.seed);
        assert_eq!(found.len(), expected.len(), "seed {}: {found:?} is not {expected:?}", self.seed);
        assert_eq!(BTreeSet::from_iter(found), expected, "seed {}", self.seed);
        let mut seen = vec![];
        let mut depths = vec![[9, 9]];
        answer.depths(&mut depths);
        for engine in 0..self.engines {
            let of = |kind| expected.iter().find(|h| h.0 == Held { engine, kind }).map_or(0, |h| h.1);
            let got = depths.get(engine as usize).copied().unwrap_or_default();
            assert_eq!(got, [of(SetKind::Gpu), of(SetKind::Any)], "seed {} engine {engine}", self.seed);
            for _ in 0..8 {
                let kind = SetKind::ALL[self.rng.below(5)];
                let at = self.rng.below(prompt.len() + 2);
                let set = live().find(|h| h.1 == Held { engine, kind }).map(|h| &h.3);
                let has = prompt.get(at).is_some_and(|fp| set.is_some_and(|set| set.contains(fp)));
                assert_eq!(
                    answer.has(&mut seen, engine, kind, at),
                    has,
                    "seed {} engine {engine} {kind:?} {at}",
                    self.seed
                );
            }
        }
        drop(answer);
        let Some(&fingerprint) = prompt.last() else { return };
        let mut found = vec![];
        self.reader.holders_of(fingerprint, |held| found.push(held));
        let expected: Vec<Held> = live().filter(|h| h.3.contains(&fingerprint)).map(|h| h.1).collect();
        assert_eq!(found.len(), expected.len(), "seed {}", self.seed);
        assert_eq!(BTreeSet::from_iter(found), BTreeSet::from_iter(expected), "seed {}", self.seed);
    }

    fn check_some(&mut self, prompts: usize) {
        for _ in 0..prompts {
            let mut prompt = self.forest.path(self.rng.below(self.forest.nodes.len()));
            match self.rng.below(4) {
                // Blocks that nobody has; part of a prompt; nothing of it.
                0 => (0..self.rng.below(40)).for_each(|_| prompt.push(self.rng.word() | 1)),
                1 => prompt.truncate(self.rng.below(prompt.len()) + 1),
                2 if self.rng.below(10) == 0 => prompt.clear(),
                _ => {}
            }
            self.check(&prompt);
        }
    }

    /// Equal digests, members and counts.
    fn check_sets(&mut self) {
        let mut all: HashSet<u64> = HashSet::new();
        for (holder, held, _, set) in self.model.holders.values() {
            let digest: Digest = set.iter().copied().collect();
            assert_eq!(self.writer.digest(*holder), Ok(digest), "seed {} {held:?}", self.seed);
            let members = self.writer.members(*holder).map(HashSet::from_iter);
            assert_eq!(members.as_ref(), Ok(set), "seed {} {held:?}", self.seed);
            all.extend(set);
        }
        assert_eq!(self.writer.stats().holders, self.model.holders.len() as u64, "seed {}", self.seed);
        (0..10_000).find(|_| !self.writer.sweep(5000));
        let Stats { used, retired, .. } = self.writer.stats();
        assert_eq!((used, retired), (all.len() as u64, 0), "seed {}", self.seed);
    }
}

#[test]
fn every_answer_equals_the_models() {
    for (seed, engines, nodes, steps) in [(1, 3, 60, 4000), (2, 70, 400, 3000), (3, 20, 3000, 700), (4, 1, 30, 2000)] {
        let mut world = World::new(seed, engines, nodes);
        for step in 0..steps {
            world.step();
            if step % 8 == 0 {
                world.check_some(2);
            }
            if step % 500 == 499 {
                world.check_sets();
            }
        }
        world.check_sets();
    }
}

#[test]
fn the_table_grows_by_splits_and_shrinks_to_nothing() {
    let mut world = World::new(5, 6, 30_000);
    for _ in 0..12 {
        world.open();
        let key = world.model.next - 1;
        world.publish(key);
        for _ in 0..12 {
            let node = world.rng.below(world.forest.nodes.len());
            let holder = &mut world.model.holders.get_mut(&key).expect("just opened");
            if !holder.1.kind.closed() {
                continue;
            }
            for root in [node, 0] {
                // A whole tree, parents first.
                let mut tree = world.forest.subtree(root);
                tree.reverse();
                let mut path = world.forest.path(root);
                path.extend(tree);
                world.writer.store(holder.0, &path).expect("live");
                holder.3.extend(path);
            }
        }
    }
    world.check_some(40);
    world.check_sets();
    let full = world.writer.stats();
    // More than one segment may hold.
    assert!(full.used > 15_000, "{full:?}");
    assert!(full.table_bytes <= full.used * 20, "{full:?}");
    // Half by removal, half by retiring.
    while let Some(key) = world.any_holder() {
        let (holder, _, _, set) = world.model.holders.remove(&key).expect("there");
        if key % 2 == 0 {
            world.writer.remove(holder, &Vec::from_iter(set)).expect("live");
        }
        world.writer.retire(holder).expect("live");
        (0..10_000).find(|_| !world.writer.sweep(1 << 16));
        world.check_some(3);
        world.check_sets();
    }
    let empty = world.writer.stats();
    assert_eq!((empty.used, empty.sets, empty.retired, empty.limbo_bytes), (0, 0, 0, 0), "{empty:?}");
    assert!(empty.table_bytes < 1024, "{empty:?}");
}

#[test]
fn a_recount_between_changes_equals_the_digest() {
    let mut world = World::new(6, 4, 20_000);
    let holder = world.writer.open(0, SetKind::Gpu).expect("room");
    let other = world.writer.open(1, SetKind::Gpu).expect("room");
    let mut walks = 0;
    for _ in 0..600 {
        let node = world.rng.below(world.forest.nodes.len());
        let (path, gone) = (world.forest.path(node), world.forest.subtree(node));
        world.writer.store(if node.is_multiple_of(2) { holder } else { other }, &path).expect("hidden");
        if node.is_multiple_of(5) {
            world.writer.remove(holder, &gone).expect("hidden");
        }
        if let Some(digest) = world.writer.recount(holder, 1).expect("hidden") {
            assert_eq!(Ok(digest), world.writer.digest(holder), "seed {}", world.seed);
            walks += 1;
        }
    }
    assert!(walks > 0 && world.writer.digest(holder).expect("hidden").count > 0);
}

#[test]
fn nothing_grows_under_churn() {
    // Ten engines that each store and evict for ever, a restart now and then: after a tenth of it the bytes stay.
    let mut rng = Seeded::new(7);
    let (mut writer, _reader) = open(Limits { spread: 7, ..Limits::default() });
    let mut engines: Vec<(Holder, Vec<u64>)> = (0..10)
        .map(|engine| {
            let holder = writer.open(engine, SetKind::Gpu).expect("room");
            writer.publish(holder).expect("hidden");
            (holder, vec![])
        })
        .collect();
    let (mut changes, mut most, mut early) = (0, 0, 0);
    while changes < 1_000_000 {
        let at = rng.below(10);
        let (holder, held) = &mut engines[at];
        // A prompt of its own, or one of forty that all may have, which makes many sets.
        let shared = rng.below(3) == 0;
        let root = if shared { rng.below(40) as u64 } else { rng.word() };
        let chain: Vec<u64> = (0..32).map(|at| Seeded::new(root.wrapping_mul(0x1234_5677) + at).word() | 1).collect();
        changes += writer.store(*holder, &chain).expect("live").changed;
        held.extend(&chain);
        if held.len() > 1600 {
            let mut gone: Vec<u64> = held.drain(..32).collect();
            gone.reverse();
            changes += writer.remove(*holder, &gone).expect("live").changed;
        }
        if rng.below(2000) == 0 {
            (*holder, *held) = (writer.clear(*holder).expect("live"), vec![]);
        }
        writer.sweep(200);
        most = writer.stats().bytes().max(most);
        if changes < 100_000 {
            early = most;
        }
    }
    assert!(most <= early + early / 50, "{early} bytes after a tenth, {most} at the end: {:?}", writer.stats());
}

#[test]
fn refusals_say_what_is_wrong() {
    let (mut writer, mut reader) = open(Limits { engines: 2, holders: 2, spread: 0 });
    let a = writer.open(0, SetKind::Gpu).expect("room");
    let b = writer.open(1, SetKind::Any).expect("room");
    assert_eq!(writer.open(1, SetKind::Gpu), Err(Refused::NoHolderLeft { limit: 2 }));
    assert_eq!(writer.open(2, SetKind::Gpu), Err(Refused::NoSuchEngine { engine: 2, limit: 2 }));
    writer.publish(a).expect("hidden");
    assert_eq!(writer.store(a, &[0, 5, 5]).map(|c| (c.changed, c.unchanged)), Ok((1, 2)));
    // While a reader still sees it, a retired number is not given out.
    let answer = reader.find(&[5]);
    writer.retire(a).expect("live");
    assert!(writer.sweep(1000));
    assert!(matches!(writer.open(1, SetKind::Gpu), Err(Refused::NoHolderLeft { .. })));
    assert_eq!(answer.iter().collect::<Vec<_>>(), [(Held { engine: 0, kind: SetKind::Gpu }, 1)]);
    drop(answer);
    assert!(!writer.sweep(1000));
    let c = writer.open(1, SetKind::Gpu).expect("room again");
    assert!(a != c && writer.digest(a).is_err() && writer.digest(b).is_ok());
    assert_eq!(reader.find(&[5]).iter().count(), 0);
}
