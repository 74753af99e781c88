//! Every number of the specification that can be a test.

use super::*;
use crate::pool::{Engine, State};
use crate::score::{self, BadWeights, PRESETS, Weights};
use proto::fleet::Source;
use std::sync::Arc;

fn engine(name: &str) -> Arc<Engine> {
    Arc::new(Engine {
        id: format!("{name}.0").into(),
        pod: name.into(),
        rank: None,
        address: std::net::SocketAddr::from(([10, 0, 0, name.bytes().last().unwrap_or(0)], 8000)),
        source: Source::Agent,
        labels: Arc::default(),
        known: None,
        model: None,
    })
}

/// `cache` in thousandths of 1,000 blocks.
fn candidate(name: &str, cache: u32, load: f64, queue: u32, health: f64, adapter: bool) -> Candidate {
    Candidate {
        blocks: 1000,
        gpu_blocks: cache,
        any_blocks: cache,
        cached_tokens: cache * 16,
        load: Some(load),
        queue,
        health,
        adapter,
        state: Some(State::InStep),
        ..Candidate::unknown(engine(name))
    }
}

fn policy_of(weights: Weights, max_queue: u32) -> Policy {
    let factors = Factors::new(weights, &[]).unwrap_or_else(|e| panic!("{e}"));
    Policy { factors, max_queue, profile: Profile::FiveFactor, mode: Mode::Route, crowding: 1.0 }
}

fn policy() -> Policy {
    policy_of(Weights::default(), 20)
}

fn asked() -> Asked {
    Asked { prompt_tokens: 16_000, ..Asked::default() }
}

fn run(policy: &Policy, candidates: &[Candidate]) -> Pick {
    pick(policy, &asked(), candidates, None, |_| true, 7)
}

fn score_of(policy: &Policy, candidate: &Candidate) -> f64 {
    let view = View { max_queue: policy.max_queue, ..View::default() };
    policy.factors.score(&asked(), candidate, &view).score
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

fn chosen(pick: &Pick, candidates: &[Candidate]) -> String {
    pick.chosen.map_or("nobody".into(), |at| candidates[at].engine.pod.to_string())
}

#[test]
fn a_perfect_engine_scores_one_and_each_factor_its_weight() {
    let policy = policy();
    let best = candidate("a", 1000, 0.0, 0, 1.0, true);
    assert!(near(score_of(&policy, &best), 1.0));
    for (worse, loss) in [
        (candidate("a", 0, 0.0, 0, 1.0, true), 0.60),
        (candidate("a", 1000, 1.0, 0, 1.0, true), 0.20),
        (candidate("a", 1000, 0.0, 20, 1.0, true), 0.10),
        (candidate("a", 1000, 0.0, 99, 1.0, true), 0.10),
        (candidate("a", 1000, 0.0, 0, 0.3, true), 0.035),
        (candidate("a", 1000, 0.0, 0, 1.0, false), 0.05),
        (candidate("a", 1000, 0.0, 1, 1.0, true), 0.005),
        (candidate("a", 900, 0.0, 0, 1.0, true), 0.06),
    ] {
        assert!(near(score_of(&policy, &worse), 1.0 - loss), "{loss}");
    }
}

#[test]
fn ten_points_of_cache_are_worth_what_people_are_told() {
    let weights = Weights::default();
    assert!(near(weights.cache / weights.load, 3.0));
    assert!(near(weights.cache / weights.queue, 6.0));
    assert!(near(weights.cache / weights.health, 12.0) && near(weights.cache / weights.adapter, 12.0));
    let policy = policy();
    let score =
        |cache, load, queue, health, adapter| score_of(&policy, &candidate("a", cache, load, queue, health, adapter));
    let gain = score(600, 0.5, 5, 1.0, true) - score(500, 0.5, 5, 1.0, true);
    assert!(near(gain, 0.06));
    assert!(near(gain, score(500, 0.2, 5, 1.0, true) - score(500, 0.5, 5, 1.0, true)), "0.30 of load");
    assert!(near(gain, score(500, 0.5, 0, 1.0, true) - score(500, 0.5, 12, 1.0, true)), "12 queued requests");
    assert!(gain > score(500, 0.5, 5, 1.0, true) - score(500, 0.5, 5, 0.3, true), "all of health");
    assert!(gain > score(500, 0.5, 5, 1.0, true) - score(500, 0.5, 5, 1.0, false), "all of adapter");
}

#[test]
fn forty_points_of_cache_do_not_dominate_and_sixty_five_do() {
    let policy = policy();
    let hot = candidate("h", 400, 1.0, 19, 0.3, false);
    let cold = candidate("c", 0, 0.0, 0, 1.0, true);
    // The queue of 19 costs 0.095, health 0.3 leaves 0.015: 0.24 + 0.005 + 0.015.
    assert!(near(score_of(&policy, &hot), 0.26));
    assert!(near(score_of(&policy, &cold), 0.40));
    let hot = candidate("h", 650, 1.0, 19, 0.3, false);
    assert!(score_of(&policy, &hot) > score_of(&policy, &cold));
    // Whatever else: 0.39 against at most 0.385.
    let worst = 0.60 * 0.65 + 0.05 * 0.3;
    assert!(worst > 0.40 && near(0.60 * 0.65 - (0.20 + 0.10 + 0.035 + 0.05), 0.005));
}

#[test]
fn a_busy_holder_beats_an_idle_stranger() {
    let policy = policy();
    let weights = Weights::default();
    let (holder, stranger) = (weights.cache + weights.load * 0.2, weights.load);
    assert!(near(holder, 0.64) && near(stranger, 0.20));
    let pair = [candidate("h", 1000, 0.8, 0, 1.0, true), candidate("s", 0, 0.0, 0, 1.0, true)];
    assert_eq!(chosen(&run(&policy, &pair), &pair), "h");
}

#[test]
fn a_busy_engine_and_one_with_a_queue() {
    let pair = [candidate("a", 500, 0.8, 0, 1.0, true), candidate("b", 500, 0.4, 10, 1.0, true)];
    let part = |policy: &Policy, c: &Candidate| score_of(policy, c) - 0.60 * 0.5 - 0.10;
    let default = policy();
    assert!(near(part(&default, &pair[0]), 0.14) && near(part(&default, &pair[1]), 0.17));
    assert_eq!(chosen(&run(&default, &pair), &pair), "b");
    // A wins when w_queue x 10 / maxQueue > w_load x 0.40.
    for (max_queue, winner) in [(11, "a"), (12, "a"), (13, "b"), (20, "b")] {
        assert_eq!(
            chosen(&run(&policy_of(Weights::default(), max_queue), &pair), &pair),
            winner,
            "maxQueue {max_queue}"
        );
    }
    for (queue, winner) in [(0.15, "b"), (0.17, "a")] {
        let weights = Weights { cache: 0.70 - queue, queue, ..Weights::default() };
        assert_eq!(chosen(&run(&policy_of(weights, 20), &pair), &pair), winner, "w_queue {queue}");
    }
    // Ten requests wait at b, so it has work to do first.
    let mut with_work = pair;
    with_work[1].backlog_tokens = 10 * 1000;
    let least = Policy { profile: Profile::LeastWork, ..policy() };
    assert_eq!(chosen(&run(&least, &with_work), &with_work), "a");
}

#[test]
fn least_work_counts_backlog_and_what_is_not_cached() {
    let least = Policy { profile: Profile::LeastWork, ..policy() };
    let mut pair = [candidate("w", 1000, 0.5, 0, 1.0, true), candidate("c", 0, 0.5, 0, 1.0, true)];
    assert_eq!(chosen(&run(&least, &pair), &pair), "w");
    pair[0].backlog_tokens = 16_001;
    assert_eq!(chosen(&run(&least, &pair), &pair), "c");
    // The longer the queues, the more a cached token is worth.
    pair.iter_mut().for_each(|c| c.queue = 1);
    assert_eq!(chosen(&run(&least, &pair), &pair), "w");
}

/// Fifty at once on four idle engines, one of them warm, each placement counted at once.
#[test]
fn a_herd_spills_over_when_the_queue_is_full() {
    let policy = policy();
    let mut four = [
        candidate("w", 1000, 0.0, 0, 1.0, true),
        candidate("x", 0, 0.0, 0, 1.0, true),
        candidate("y", 0, 0.0, 0, 1.0, true),
        candidate("z", 0, 0.0, 0, 1.0, true),
    ];
    for seed in 0..50 {
        let pick = pick(&policy, &asked(), &four, None, |_| true, seed);
        four[pick.chosen.unwrap_or(usize::MAX)].queue += 1;
    }
    assert_eq!(four.each_ref().map(|c| c.queue), [20, 10, 10, 10]);
}

#[test]
fn when_all_are_full_cache_decides_among_those_near_the_shortest() {
    let policy = policy();
    let three = [
        candidate("w", 1000, 0.5, 45, 1.0, true),
        candidate("x", 500, 0.5, 40, 1.0, true),
        candidate("y", 0, 0.5, 25, 1.0, true),
    ];
    let pick = run(&policy, &three);
    assert_eq!(chosen(&pick, &three), "w");
    assert_eq!(pick.reason, "all queues are full");
    let mut far = three;
    far[0].queue = 46;
    let pick = run(&policy, &far);
    assert_eq!(chosen(&pick, &far), "x");
    assert_eq!(pick.excluded, [(0, Excluded::QueueFull)]);
}

#[test]
fn exclusions_have_reasons() {
    let policy = policy();
    let mut all = [
        candidate("a", 1000, 0.0, 0, 0.29, true),
        candidate("b", 1000, 0.0, 20, 1.0, true),
        candidate("c", 1000, 0.0, 0, 1.0, true),
        candidate("d", 1000, 0.0, 0, 1.0, true),
        candidate("e", 1000, 0.0, 0, 1.0, true),
        candidate("f", 1000, 0.0, 0, 1.0, true),
        candidate("g", 0, 1.0, 19, 0.3, false),
    ];
    all[2].closed = Some("draining");
    all[3].closed = Some("asleep");
    all[4].state = Some(State::Silent);
    let subset = Subset::new(
        all.iter()
            .filter(|c| &*c.engine.pod != "f")
            .map(|c| c.engine.address.to_string())
            .collect::<Vec<_>>()
            .iter()
            .map(String::as_str),
    );
    let pick = pick(&policy, &asked(), &all, Some(&subset), |_| true, 0);
    let mut excluded = pick.excluded.clone();
    excluded.sort_by_key(|(at, _)| *at);
    assert_eq!(
        excluded,
        [
            (0, Excluded::Health),
            (1, Excluded::QueueFull),
            (2, Excluded::Draining),
            (3, Excluded::Asleep),
            (4, Excluded::Silent),
            (5, Excluded::Subset),
        ]
    );
    assert_eq!(chosen(&pick, &all), "g");
}

#[test]
fn nobody_left_is_said() {
    let pair = [candidate("a", 1000, 0.0, 0, 0.0, true)];
    assert_eq!(run(&policy(), &pair).chosen, None);
    assert_eq!(run(&policy(), &[]).chosen, None);
    let nobody =
        pick(&policy(), &asked(), &[candidate("a", 0, 0.0, 0, 1.0, true)], Some(&Subset::default()), |_| true, 0);
    assert_eq!(nobody.chosen, None);
    let other_model = pick(&policy(), &asked(), &[candidate("a", 0, 0.0, 0, 1.0, true)], None, |_| false, 0);
    assert_eq!(other_model.excluded, [(0, Excluded::Model)]);
}

#[test]
fn silent_engines_are_picked_when_nobody_else_is_left() {
    let mut pair = [candidate("a", 0, 1.0, 0, 1.0, true), candidate("b", 0, 1.0, 0, 0.1, true)];
    pair[0].state = Some(State::Silent);
    let pick = run(&policy(), &pair);
    assert_eq!((chosen(&pick, &pair).as_str(), pick.reason), ("a", "only silent engines are left"));
}

#[test]
fn ties_go_to_load_then_queue_then_lot() {
    let policy = policy();
    // 0.20 of load is 20 x 0.01 of the queue: equal sums, unlike parts.
    let pair = [candidate("a", 500, 0.5, 4, 1.0, true), candidate("b", 500, 0.6, 0, 1.0, true)];
    let pick_ = run(&policy, &pair);
    assert_eq!((chosen(&pick_, &pair).as_str(), pick_.reason), ("a", "equal score, least load"));
    let mut counts = [0usize; 3];
    let three = ["a", "b", "c"].map(|name| candidate(name, 0, 0.5, 0, 1.0, true));
    for seed in 0..3000 {
        let by_lot = pick(&policy, &asked(), &three, None, |_| true, seed);
        assert_eq!(by_lot.chosen, pick(&policy, &asked(), &three, None, |_| true, seed).chosen, "seed {seed}");
        counts[by_lot.chosen.unwrap_or(9)] += 1;
    }
    assert!(counts.iter().all(|c| (800..1200).contains(c)), "{counts:?}");
    let least = Policy { profile: Profile::LeastWork, ..policy };
    let pair = [candidate("a", 0, 0.5, 3, 1.0, true), candidate("b", 0, 0.5, 2, 1.0, true)];
    assert_eq!(run(&least, &pair).reason, "equal score and load, shortest queue");
}

#[test]
fn observing_routes_by_requests_and_notes_the_best() {
    let observe = Policy { mode: Mode::Observe, ..policy() };
    let mut pair = [candidate("w", 1000, 0.9, 3, 1.0, true), candidate("c", 0, 0.1, 0, 1.0, true)];
    pair[1].running = 2;
    let pick = run(&observe, &pair);
    assert_eq!((pick.chosen, pick.best), (Some(1), Some(0)));
}

#[test]
fn weights_must_sum_to_one_within_a_millionth() {
    let of = |cache| Factors::new(Weights { cache, ..Weights::default() }, &[]).map(|_| ());
    assert_eq!(of(0.60 + 9e-7), Ok(()));
    assert!(matches!(of(0.60 + 2e-6), Err(BadWeights::Sum { .. })));
    assert!(matches!(of(f64::NAN), Err(BadWeights::Range { .. })));
    assert!(matches!(of(-0.1), Err(BadWeights::Range { .. })));
    let told = of(0.70).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(told.contains("1.100000") && told.contains("0.100000"), "{told}");
    for (name, weights, _) in PRESETS {
        assert!(Factors::new(weights, &[]).is_ok(), "{name}");
    }
    let more =
        |name: &str| Factors::new(Weights { cache: 0.5, ..Weights::default() }, &[(name.into(), 0.1)]).map(|_| ());
    assert_eq!(more("cost"), Ok(()));
    assert_eq!(more("coast"), Err(BadWeights::NoScorer("coast".into())));
    assert_eq!(more("cache"), Err(BadWeights::Twice("cache".into())));
}

#[test]
fn cost_prefers_the_cheap_while_cache_is_near() {
    let weights = Weights { cache: 0.30, ..Weights::default() };
    let factors = Factors::new(weights, &[("cost".into(), 0.30)]).unwrap_or_else(|e| panic!("{e}"));
    let policy = Policy { factors, ..policy() };
    let priced = |name: &str, cache, price: &str| {
        let mut candidate = candidate(name, cache, 0.5, 0, 1.0, true);
        let labels = Arc::new([("cost".to_string(), price.to_string())].into());
        candidate.engine = Arc::new(Engine { labels, ..(*candidate.engine).clone() });
        candidate
    };
    let near = [priced("a", 900, "3.67"), priced("s", 720, "0.38")];
    assert_eq!(chosen(&run(&policy, &near), &near), "s");
    let far = [priced("a", 900, "3.67"), priced("s", 700, "0.38")];
    // 0.3 x 0.9 against 0.3 x 0.7: 20 points apart, price counts no more.
    assert_eq!(chosen(&run(&policy, &far), &far), "a");
    let fault = [priced("a", 900, "free")];
    let pick = run(&policy, &fault);
    assert_eq!(pick.ranked[0].scored.faults, ["cost"]);
    assert!(pick.ranked[0].scored.values.contains(&("cost", score::FAULT_VALUE)));
}

#[test]
fn lower_tiers_count_less_and_load_is_read_as_specified() {
    let mut both = candidate("a", 400, 0.0, 0, 1.0, true);
    both.any_blocks = 900;
    assert!(near(both.cache(), 0.4 + 0.8 * 0.5));
    assert!(near(score::load(None, 0.3, 4, 8, 1.0), 0.5));
    assert!(near(score::load(None, 0.75, 4, 8, 1.0), 0.75));
    assert!(near(score::load(Some(0.5), 0.75, 8, 8, 1.0), 0.5));
    assert!(near(score::load(Some(0.5), 0.0, 0, 0, 0.8), 0.625));
    assert!(near(score::load(Some(0.9), 0.0, 0, 0, 0.8), 1.0));
    assert!(near(score::load(None, f32::NAN, 0, 0, 1.0), 1.0));
}

/// 4,096 tokens are 256 blocks; a match of 0.75 saves 3,072 tokens: of 8.2 s of prefill, 6.15.
#[test]
fn a_match_ratio_is_a_share_of_prefill() {
    let quarter = Candidate { blocks: 4096 / 16, gpu_blocks: 192, any_blocks: 192, ..Candidate::unknown(engine("a")) };
    assert!(near(quarter.cache(), 0.75));
    assert_eq!(proto::block::cached_tokens(192, 16, 4097), 3072);
    assert!(near(8.2 * quarter.cache(), 6.15) && near(8.2 - 6.15, 2.05));
}
