//! Residency against the naive model: any order of copies arriving and going, duplicates and orphans.

use harness::naive::{Copies, apply};
use harness::seeded::Seeded;
use proto::digest::Digest;
use proto::residency::{Link, Residency};
use std::collections::{BTreeMap, BTreeSet};

#[test]
fn any_order_of_copies_gives_the_naive_set() {
    for seed in 0..60 {
        run(seed);
    }
}

fn run(seed: u64) {
    let mut dice = Seeded::new(seed);
    // A forest: few enough blocks that duplicates, orphans and returns are common.
    let blocks = 20 + dice.below(60) as u64;
    let parents: BTreeMap<u64, Link> = (0..blocks)
        .map(|i| {
            (
                1000 + i,
                if i < 2 || dice.percent(5) {
                    Link::Root(1 + i % 2)
                } else {
                    Link::Block(1000 + dice.below(i as usize) as u64)
                },
            )
        })
        .collect();
    let names: Vec<u64> = parents.keys().copied().collect();
    let (mut real, mut naive, mut told) = (Residency::new(), Copies::default(), BTreeSet::new());
    for step in 0..400 {
        let mut changes = vec![];
        let fp = *dice.pick(&names);
        match dice.below(100) {
            0 => {
                real.clear();
                naive = Copies::default();
                told.clear();
            }
            1..=55 => {
                real.add(fp, parents[&fp], &mut changes);
                naive.add(fp, parents[&fp]);
            }
            _ => assert_eq!(real.drop(fp, &mut changes), naive.drop(fp), "seed {seed} step {step}"),
        }
        changes.into_iter().for_each(|change| apply(&mut told, &parents, change));
        let want = naive.reachable();
        assert_eq!(told, want, "seed {seed} step {step}");
        assert_eq!(real.digest(), Digest::from_iter(want.iter().copied()), "seed {seed} step {step}");
        assert_eq!(real.resident(), naive.0.len(), "seed {seed} step {step}");
        assert!(real.nodes() <= 2 * naive.0.len() + 2 * names.len(), "seed {seed} step {step}");

        let prompt = path(&parents, *dice.pick(&names));
        let depth = prompt.iter().take_while(|fp| want.contains(fp)).count();
        assert_eq!(real.depth(&prompt), depth, "seed {seed} step {step}");

        let mut listed = BTreeSet::new();
        real.chains(|parent, run| {
            let mut parent = parent;
            for fp in run {
                assert_eq!(parents[fp], parent, "seed {seed} step {step}");
                if let Link::Block(parent) = parent {
                    assert!(listed.contains(&parent), "seed {seed} step {step}: {fp} listed before its parent");
                }
                assert!(listed.insert(*fp), "seed {seed} step {step}: {fp} listed twice");
                parent = Link::Block(*fp);
            }
        });
        assert_eq!(listed, want, "seed {seed} step {step}");
    }
    for fp in &names {
        let mut changes = vec![];
        while real.drop(*fp, &mut changes) {}
    }
    assert_eq!(real.nodes(), 0, "seed {seed}: nodes are left when nothing is resident");
}

/// The prompt that ends at a block.
fn path(parents: &BTreeMap<u64, Link>, end: u64) -> Vec<u64> {
    let mut path = vec![end];
    while let Link::Block(parent) = parents[path.last().expect("not empty")] {
        path.push(parent);
    }
    path.reverse();
    path
}
