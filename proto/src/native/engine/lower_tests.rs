//! What tiers below the GPU do to the *any* set.

use super::*;
use crate::block::{self, Namespace};
use crate::native::dialect::{Event, EventBatch, Removed};
use crate::native::engine::Limits;
use std::collections::{BTreeMap, BTreeSet};

const TOKENS: [u32; 6] = [1, 2, 3, 4, 5, 6];

fn engine() -> NativeEngine {
    NativeEngine::new("m", 3, Limits::default())
}

fn stored(medium: Medium, parent: Option<EngineHash>, hashes: &[EngineHash], tokens: &[u32]) -> Event {
    Event::Stored(Box::new(Stored {
        parent,
        medium,
        hashes: hashes.to_vec(),
        tokens: tokens.to_vec(),
        block_size: 2,
        ..Stored::default()
    }))
}

fn removed(medium: Medium, hashes: &[EngineHash]) -> Event {
    Event::Removed(Removed { hashes: hashes.to_vec(), medium, ..Removed::default() })
}

fn apply(engine: &mut NativeEngine, events: impl IntoIterator<Item = Event>) {
    let batch = EventBatch { events: events.into_iter().collect(), ..EventBatch::default() };
    engine.apply(batch, &mut vec![]);
}

/// Blocks of the prompt in *gpu* and in *any*.
fn depths(engine: &NativeEngine) -> (usize, usize) {
    let root = block::root(Namespace { model: "m", adapter: "", salt: "" }, 3);
    let prompt = block::chain(root, 2, &TOKENS);
    let gpu = engine.residency().depth(&prompt);
    (gpu, engine.any().map_or(gpu, |any| any.depth(&prompt)))
}

#[test]
fn hashes_alone_are_resolved_through_the_names_of_the_gpu() {
    let mut engine = engine();
    apply(&mut engine, [stored(Medium::Gpu, None, &[10, 11, 12], &TOKENS)]);
    assert!(engine.any().is_none());
    apply(&mut engine, [stored(Medium::Cpu, None, &[10, 11, 99], &[])]);
    assert_eq!((depths(&engine), engine.counters().unresolved), ((3, 3), 1));
    apply(&mut engine, [removed(Medium::Gpu, &[12, 11, 10])]);
    assert_eq!(depths(&engine), (0, 2));
    // Never back up: a block on the GPU after one below is of no use there, and neither is it in any.
    apply(&mut engine, [stored(Medium::Gpu, Some(11), &[12], &TOKENS[4..])]);
    assert_eq!(depths(&engine), (0, 2));
    apply(&mut engine, [removed(Medium::Cpu, &[10, 11])]);
    assert_eq!((depths(&engine), engine.counters().lower_removed), ((0, 0), 2));
    assert_eq!(engine.any().map(Residency::nodes), Some(0));
}

#[test]
fn a_block_that_leaves_the_gpu_in_the_step_of_its_announcement_is_known() {
    let mut engine = engine();
    apply(&mut engine, [stored(Medium::Gpu, None, &[10, 11], &TOKENS[..4]), stored(Medium::Cpu, None, &[10], &[])]);
    apply(&mut engine, [removed(Medium::Gpu, &[11]), stored(Medium::Storage, None, &[11], &[])]);
    assert_eq!((depths(&engine), engine.counters().unresolved), ((1, 2), 0));
    apply(&mut engine, [removed(Medium::Gpu, &[10])]);
    apply(&mut engine, [removed(Medium::Storage, &[11]), removed(Medium::Cpu, &[10])]);
    assert_eq!((depths(&engine), engine.blocks.len()), ((0, 0), 0));
}

#[test]
fn a_connector_may_say_everything_itself() {
    let mut engine = engine();
    apply(&mut engine, [stored(Medium::Cpu, None, &[10, 11], &TOKENS[..4])]);
    // Overlapping chunks list a hash twice: the first removal is not the last copy.
    apply(&mut engine, [stored(Medium::Cpu, None, &[10, 11], &TOKENS[..4]), removed(Medium::Cpu, &[10, 11])]);
    assert_eq!(depths(&engine), (0, 2));
    apply(&mut engine, [stored(Medium::Gpu, None, &[10], &TOKENS[..2])]);
    assert_eq!(depths(&engine), (1, 2));
    apply(&mut engine, [removed(Medium::Cpu, &[10, 11])]);
    assert_eq!(depths(&engine), (1, 1));
}

#[test]
fn stores_without_removals_are_believed_for_a_while() {
    let mut engine = engine();
    engine.tick(1000);
    apply(&mut engine, [stored(Medium::Gpu, None, &[10, 11], &TOKENS[..4]), stored(Medium::Cpu, None, &[10, 11], &[])]);
    apply(&mut engine, [removed(Medium::Gpu, &[11, 10])]);
    engine.tick(1000 + ADVISORY_MS - 1);
    assert_eq!(depths(&engine), (0, 2));
    engine.tick(1000 + ADVISORY_MS);
    assert_eq!((depths(&engine), engine.counters().expired, engine.blocks.len()), ((0, 0), 2, 0));
    // Who announces removals is believed until then.
    apply(&mut engine, [stored(Medium::Gpu, None, &[10, 11], &TOKENS[..4]), stored(Medium::Cpu, None, &[10, 11], &[])]);
    apply(&mut engine, [removed(Medium::Cpu, &[11]), removed(Medium::Gpu, &[11, 10])]);
    engine.tick(u64::MAX);
    assert_eq!(depths(&engine), (0, 1));
}

#[test]
fn a_clear_that_names_its_place_leaves_the_others() {
    let mut engine = engine();
    apply(&mut engine, [stored(Medium::Gpu, None, &[10, 11], &TOKENS[..4]), stored(Medium::Cpu, None, &[10], &[])]);
    apply(&mut engine, [Event::Cleared(Some(Medium::Gpu))]);
    assert_eq!(depths(&engine), (0, 1));
    apply(&mut engine, [Event::Cleared(None)]);
    assert_eq!((depths(&engine), engine.blocks.len()), ((0, 0), 0));
    assert!(engine.any_changes(&mut vec![]), "emptied");
}

/// Any order of stores and removals in two tiers gives the sets of their definitions, and the changes that are told
/// give the same.
#[test]
fn random_tiers_give_the_naive_sets() {
    for seed in 1..=40u64 {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut below = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        };
        let parents: Vec<Option<u64>> = (0..40).map(|n| (n > 3 && below(10) > 0).then(|| below(n))).collect();
        let root = block::root(Namespace { model: "m", adapter: "", salt: "" }, 3);
        let mut names: Vec<Fingerprint> = vec![];
        for (n, parent) in parents.iter().enumerate() {
            let before = parent.map_or(root, |p| names[p as usize]);
            names.push(block::next(before, &[n as u32, 7], &[]));
        }
        let mut engine = engine();
        let (mut gpu, mut host) = (BTreeMap::<u64, u32>::new(), BTreeMap::<u64, u32>::new());
        let (mut told, mut changes) = (BTreeSet::new(), vec![]);
        for step in 0..400 {
            let n = below(40);
            let (tier, medium) = if below(2) == 0 { (&mut gpu, Medium::Gpu) } else { (&mut host, Medium::Cpu) };
            if below(3) > 0 {
                let parent = parents[n as usize].map(|p| p + 1000);
                let alone = medium == Medium::Cpu && below(2) == 0;
                if alone && !engine.blocks.contains_key(&(n + 1000)) {
                    continue;
                }
                let tokens: &[u32] = if alone { &[] } else { &[n as u32, 7] };
                *tier.entry(n).or_default() += 1;
                apply(&mut engine, [stored(medium, parent, &[n + 1000], tokens)]);
            } else if let Some(count) = tier.get_mut(&n) {
                *count -= 1;
                if *count == 0 {
                    tier.remove(&n);
                }
                apply(&mut engine, [removed(medium, &[n + 1000])]);
            }
            // A parked block is named when its parent is, wherever that is: what is resident and named is what counts.
            let reachable = |n: u64, there: &dyn Fn(u64) -> bool| {
                let mut at = Some(n);
                std::iter::from_fn(|| at.inspect(|block| at = parents[*block as usize])).all(there)
            };
            let in_gpu = |n: u64| reachable(n, &|block| gpu.contains_key(&block));
            if engine.any_changes(&mut changes) {
                told.clear();
            }
            for change in &changes {
                assert!(match *change {
                    Change::Added { fp, .. } => told.insert(fp),
                    Change::Removed { fp } => told.remove(&fp),
                });
            }
            for n in 0..40 {
                let fp = names[n as usize];
                assert_eq!(engine.residency().is_reachable(fp), in_gpu(n), "seed {seed} step {step} block {n}");
                let any = reachable(n, &|block| host.contains_key(&block) || in_gpu(block));
                let got = engine.any().map_or(in_gpu(n), |any| any.is_reachable(fp));
                assert_eq!(got, any, "seed {seed} step {step} block {n} in any");
                assert!(engine.any().is_none() || told.contains(&fp) == any, "seed {seed} step {step} block {n} told");
            }
        }
    }
}
