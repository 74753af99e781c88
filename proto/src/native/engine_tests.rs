//! What a stock engine's events do to the set that is credited to it.

use super::*;
use crate::block::{self, Namespace};
use crate::residency::Link;
use std::collections::BTreeMap;

const SIZE: u32 = 2;
const SEED: u64 = 3;

fn root(adapter: &str, salt: &str) -> Fingerprint {
    block::root(Namespace { model: "m", adapter, salt }, SEED)
}

fn engine() -> NativeEngine {
    NativeEngine::new("m", SEED, Limits::default())
}

/// A store event of an old dialect: copies always count, extras are untold.
fn stored(parent: Option<EngineHash>, hashes: &[EngineHash], tokens: &[u32]) -> Stored {
    Stored { parent, hashes: hashes.to_vec(), tokens: tokens.to_vec(), block_size: SIZE, ..Stored::default() }
}

fn removed(hashes: &[EngineHash]) -> Event {
    Event::Removed(Removed { hashes: hashes.to_vec(), ..Removed::default() })
}

fn apply(engine: &mut NativeEngine, events: impl IntoIterator<Item = Event>) -> (bool, Vec<Change>) {
    let mut changes = vec![];
    let batch = EventBatch { events: events.into_iter().collect(), ..EventBatch::default() };
    let cleared = engine.apply(batch, &mut changes);
    (cleared, changes)
}

fn store(engine: &mut NativeEngine, event: Stored) -> Vec<Change> {
    let (cleared, changes) = apply(engine, [Event::Stored(Box::new(event))]);
    assert!(!cleared);
    changes
}

fn depth(engine: &NativeEngine, root: Fingerprint, tokens: &[u32]) -> usize {
    engine.residency().depth(&block::chain(root, SIZE as usize, tokens))
}

const TOKENS: [u32; 6] = [1, 2, 3, 4, 5, 6];

#[test]
fn a_blocks_parent_is_the_block_before_it_in_the_event() {
    let mut engine = engine();
    let changes = store(&mut engine, stored(None, &[10, 11, 12], &TOKENS));
    let chain = block::chain(root("", ""), 2, &TOKENS);
    let parents = [Link::Root(root("", "")), Link::Block(chain[0]), Link::Block(chain[1])];
    let want: Vec<Change> = parents.into_iter().zip(&chain).map(|(parent, &fp)| Change::Added { parent, fp }).collect();
    assert_eq!(changes, want);
    let (_, changes) = apply(&mut engine, [removed(&[11])]);
    assert_eq!(changes, [Change::Removed { fp: chain[2] }, Change::Removed { fp: chain[1] }]);
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 1);
    store(&mut engine, stored(Some(10), &[11], &[3, 4]));
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 3);
}

#[test]
fn copies_are_counted_and_unknown_removals_pass() {
    let mut engine = engine();
    store(&mut engine, stored(None, &[10], &[1, 2]));
    store(&mut engine, stored(None, &[10], &[1, 2]));
    apply(&mut engine, [removed(&[10])]);
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 1);
    apply(&mut engine, [removed(&[10])]);
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 0);
    apply(&mut engine, [removed(&[10, 99])]);
    let counters = engine.counters();
    assert_eq!((counters.stored, counters.removed, counters.unknown_removed), (2, 2, 2));
}

#[test]
fn the_engines_own_count_of_copies_is_taken() {
    let mut engine = engine();
    store(&mut engine, stored(None, &[10, 11], &[1, 2, 3, 4]));
    let left = |remaining| {
        Event::Removed(Removed { hashes: vec![10], remaining: Some(vec![remaining]), ..Removed::default() })
    };
    apply(&mut engine, [left(2)]);
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 2);
    apply(&mut engine, [left(0)]);
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 0);
}

#[test]
fn a_repeated_announcement_is_no_copy() {
    let mut engine = engine();
    let again = || Stored { may_repeat: true, ..stored(None, &[10, 11], &TOKENS[..4]) };
    store(&mut engine, again());
    assert_eq!(store(&mut engine, again()), []);
    assert_eq!(engine.counters().repeated, 2);
    // What follows a prefix is never a repetition: a prompt whose last block was computed again.
    store(&mut engine, Stored { may_repeat: true, ..stored(Some(10), &[11], &[3, 4]) });
    apply(&mut engine, [removed(&[11])]);
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 2);
    apply(&mut engine, [removed(&[11])]);
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 1);
    apply(&mut engine, [removed(&[10])]);
    assert_eq!((depth(&engine, root("", ""), &TOKENS), engine.residency().nodes()), (0, 0));
}

#[test]
fn children_wait_for_an_unknown_parent() {
    let mut engine = engine();
    assert_eq!(store(&mut engine, stored(Some(11), &[12], &[5, 6])), []);
    assert_eq!(store(&mut engine, stored(Some(10), &[11], &[3, 4])), []);
    assert_eq!((engine.parked_tokens(), engine.unnamed(), engine.counters().parked), (4, 2, 2));
    assert_eq!(store(&mut engine, stored(None, &[10], &[1, 2])).len(), 3);
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 3);
    assert_eq!((engine.parked_tokens(), engine.unnamed(), engine.counters().unparked), (0, 0, 2));
}

#[test]
fn a_parked_block_keeps_its_copies_and_can_be_removed() {
    let mut engine = engine();
    store(&mut engine, stored(Some(10), &[11, 12], &[3, 4, 5, 6]));
    store(&mut engine, stored(Some(10), &[11], &[3, 4]));
    apply(&mut engine, [removed(&[11, 12])]);
    assert_eq!((engine.parked_tokens(), engine.unnamed()), (2, 1));
    store(&mut engine, stored(None, &[10], &[1, 2]));
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 2);
    apply(&mut engine, [removed(&[11])]);
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 1);
}

#[test]
fn no_parent_is_ever_guessed() {
    let mut engine = engine();
    // Some simulators say 0 for every parent: that is a hash like any other, and nobody's.
    store(&mut engine, stored(Some(0), &[10], &[1, 2]));
    store(&mut engine, stored(Some(0), &[11], &[3, 4]));
    assert_eq!((engine.residency().resident(), engine.unnamed()), (0, 2));
}

#[test]
fn namespaces_do_not_meet() {
    let mut engine = engine();
    let told = |adapter: &str, keys: &[&str], hash| Stored {
        adapter: if adapter.is_empty() { Adapter::None } else { Adapter::Named(adapter.to_owned()) },
        extras: Extras::Told(vec![keys.iter().map(|key| Key::Text((*key).to_owned())).collect()]),
        ..stored(None, &[hash], &[1, 2])
    };
    for (event, name) in [
        (told("", &[], 1), root("", "")),
        (told("x", &["x"], 2), root("x", "")),
        (told("y", &["y"], 3), root("y", "")),
        (told("", &["s"], 4), root("", "s")),
        (told("", &["t"], 5), root("", "t")),
        (told("x", &["x", "s"], 6), root("x", "s")),
    ] {
        assert_eq!(depth(&engine, name, &TOKENS), 0);
        store(&mut engine, event);
        assert_eq!(depth(&engine, name, &TOKENS), 1);
    }
    assert_eq!((engine.unnamed(), engine.counters().hidden), (0, 0));
}

#[test]
fn what_hides_something_is_not_credited() {
    let mut engine = engine();
    store(&mut engine, stored(None, &[10], &[1, 2]));
    // The same tokens under another hash: a salt that this dialect does not tell.
    store(&mut engine, stored(None, &[20, 21], &[1, 2, 3, 4]));
    assert_eq!((engine.counters().hidden, engine.counters().unnamed_parent), (1, 1));
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 1);
    apply(&mut engine, [removed(&[10])]);
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 0);
    // Adapters by number only, and keys that leave a doubt.
    store(&mut engine, Stored { adapter: Adapter::Unnamed, ..stored(None, &[30], &[7, 8]) });
    let keys = Extras::Told(vec![vec![], vec![Key::Text("image".to_owned())]]);
    store(&mut engine, Stored { extras: keys, ..stored(None, &[40, 41], &[7, 8, 9, 9]) });
    assert_eq!((engine.counters().unnamed_adapter, engine.counters().unnamed_keys), (1, 1));
    assert_eq!((engine.residency().resident(), engine.unnamed()), (1, 4));
    apply(&mut engine, [removed(&[20, 21, 30, 40, 41])]);
    assert_eq!((engine.unnamed(), engine.counters().unknown_removed), (0, 0));
}

#[test]
fn with_look_ahead_a_block_has_several_hashes() {
    let mut engine = engine();
    for hash in [10, 20] {
        store(&mut engine, Stored { lookahead: true, ..stored(None, &[hash], &[1, 2]) });
    }
    assert!(engine.lookahead());
    apply(&mut engine, [removed(&[10])]);
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 1);
    apply(&mut engine, [removed(&[20])]);
    assert_eq!(depth(&engine, root("", ""), &TOKENS), 0);
}

#[test]
fn only_one_full_attention_group_feeds_the_set() {
    let mut engine = engine();
    let of = |group, kind, hash| Stored { group, kind, ..stored(None, &[hash], &[1, 2]) };
    store(&mut engine, of(1, Some(GroupKind::Other), 10));
    store(&mut engine, of(0, Some(GroupKind::Full), 10));
    store(&mut engine, of(2, Some(GroupKind::Full), 10));
    apply(&mut engine, [Event::Removed(Removed { hashes: vec![10], group: 1, ..Removed::default() })]);
    assert_eq!((depth(&engine, root("", ""), &TOKENS), engine.counters().other_group), (1, 3));
}

#[test]
fn groups_without_kinds_are_not_credited() {
    let mut engine = engine();
    store(&mut engine, stored(None, &[10], &[1, 2]));
    let other = || Event::Stored(Box::new(Stored { group: 1, ..stored(None, &[10], &[1, 2]) }));
    assert_eq!(apply(&mut engine, [other()]), (true, vec![]));
    assert_eq!(apply(&mut engine, [other()]), (false, vec![]));
    store(&mut engine, stored(None, &[10], &[1, 2]));
    assert!(engine.blind());
    assert_eq!((engine.residency().resident(), engine.counters().unknown_group), (0, 3));
    engine.restart();
    store(&mut engine, stored(None, &[10], &[1, 2]));
    assert_eq!((engine.blind(), engine.residency().reachable()), (false, 1));
}

#[test]
fn what_is_on_another_machine_or_nowhere_known_counts_for_nothing() {
    let mut engine = engine();
    for (medium, remote) in [(Medium::Cpu, true), (Medium::Gpu, true), (Medium::Unknown, false)] {
        store(&mut engine, Stored { medium, remote, ..stored(None, &[10], &[1, 2]) });
    }
    let counters = engine.counters();
    assert_eq!((counters.other_machine, counters.unknown_medium), (2, 1));
    assert_eq!((engine.residency().resident(), engine.unnamed(), engine.any().is_none()), (0, 0, true));
}

#[test]
fn events_that_do_not_fit_are_passed_over() {
    let mut engine = engine();
    let chain = [10, 11];
    store(&mut engine, stored(None, &chain, &TOKENS[..4]));
    let before = engine.residency().digest();
    store(&mut engine, stored(None, &[20], &[1, 2, 3]));
    store(&mut engine, stored(None, &[], &[]));
    store(&mut engine, Stored { block_size: 0, ..stored(None, &[20], &[]) });
    store(&mut engine, Stored { block_size: MAX_BLOCK_SIZE + 1, ..stored(None, &[20], &[1]) });
    store(&mut engine, Stored { block_size: 1, ..stored(Some(11), &[20], &[1]) });
    store(&mut engine, stored(Some(11), &[20, 20], &TOKENS[..4]));
    store(&mut engine, stored(Some(20), &[20], &[1, 2]));
    store(&mut engine, stored(None, &chain, &[1, 2, 9, 9]));
    store(&mut engine, Stored { extras: Extras::Unreadable, ..stored(Some(11), &[20], &[1, 2]) });
    store(&mut engine, Stored { extras: Extras::Told(vec![]), ..stored(Some(11), &[20], &[1, 2]) });
    let c = *engine.counters();
    assert_eq!((c.unplaced, c.other_size, c.circular, c.contradicted, c.bad_keys), (4, 1, 2, 1, 2));
    assert_eq!((engine.residency().digest(), engine.unnamed()), (before, 0));
    let names: Vec<&str> = c.iter().filter(|(_, n)| *n > 0).map(|(name, _)| name).collect();
    assert_eq!(names, ["stored", "unplaced", "other_size", "circular", "contradicted", "bad_keys"]);
}

#[test]
fn a_clear_makes_what_was_told_before_it_void() {
    let mut engine = engine();
    let one = |hash| Event::Stored(Box::new(stored(None, &[hash], &[1, 2])));
    let (cleared, changes) = apply(&mut engine, [one(10), Event::Cleared(None), one(20)]);
    assert_eq!((cleared, changes.len(), engine.residency().reachable()), (true, 1, 1));
    assert_eq!(apply(&mut engine, [Event::Cleared(None)]), (true, vec![]));
    assert_eq!(engine.residency().reachable(), 0);
}

#[test]
fn memory_is_bounded() {
    let mut engine = NativeEngine::new("m", SEED, Limits { blocks: 3, parked_tokens: 4 });
    store(&mut engine, stored(Some(1), &[10, 11, 12], &TOKENS));
    // The third is without a name, and so is what follows it; its parent does not change that.
    assert_eq!((engine.parked_tokens(), engine.unnamed(), engine.counters().over_limit), (4, 3, 1));
    store(&mut engine, stored(None, &[20, 21], &TOKENS[..4]));
    assert_eq!((engine.unnamed(), engine.counters().over_limit), (3, 3));
    apply(&mut engine, [removed(&[10, 11, 12])]);
    assert_eq!((engine.parked_tokens(), engine.unnamed()), (0, 0));
    assert!(engine.waiting.is_empty());
}

/// A store follows the engine's truth; the set must be what the copies say, whenever it is looked at.
#[test]
fn random_streams_give_the_naive_set() {
    for seed in 1..=40u64 {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut below = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        };
        // A forest of blocks: block n follows a block before it, or starts a prompt. Its hash is n + 1000.
        let parents: Vec<Option<u64>> = (0..60).map(|n| (n > 4 && below(10) > 0).then(|| below(n))).collect();
        let mut names: Vec<Fingerprint> = vec![];
        for (n, parent) in parents.iter().enumerate() {
            let before = parent.map_or(root("", ""), |p| names[p as usize]);
            names.push(block::next(before, &[n as u32, 7], &[]));
        }
        let (mut engine, mut copies) = (engine(), BTreeMap::<u64, u32>::new());
        for step in 0..400 {
            let n = below(60);
            if below(3) > 0 {
                let parent = parents[n as usize].map(|p| p + 1000);
                store(&mut engine, stored(parent, &[n + 1000], &[n as u32, 7]));
                *copies.entry(n).or_default() += 1;
            } else if let Some(count) = copies.get_mut(&n) {
                apply(&mut engine, [removed(&[n + 1000])]);
                *count -= 1;
                if *count == 0 {
                    copies.remove(&n);
                }
            }
            for n in 0..60 {
                // Reachable: a copy of it and of every block before it.
                let mut at = Some(n);
                let mut all = true;
                while let Some(block) = at {
                    all &= copies.contains_key(&block);
                    at = parents[block as usize];
                }
                let got = engine.residency().is_reachable(names[n as usize]);
                assert_eq!(got, all, "seed {seed} step {step} block {n}");
            }
        }
    }
}
