//! What a heartbeat says, and when.

use super::*;
use crate::engine::{Engine, Request};
use crate::facts::Counts;
use crate::ring;
use proto::event::{Gpus, State};
use proto::id::Epoch;

fn pair() -> (Engine, Feed) {
    let mut facts = Facts::plain("tiny", 16, 100);
    (facts.max_adapters, facts.max_cached_adapters) = (1, 2);
    let identity = Identity::new("e", Epoch { start_ms: 1, random: 2 }, &facts, None, 7);
    let (writer, reader) = ring::for_pool(100);
    let gauges = Arc::new(Gauges::default());
    let engine = Engine::new(&facts, "tiny", 7, writer, gauges.clone(), Box::new(|| ()));
    (engine, Feed::new(identity, facts, reader, gauges, 100))
}

/// What is published at this moment, if it is a heartbeat.
fn beat(feed: &mut Feed, now_ms: u64) -> Option<State> {
    let from = feed.replay().next();
    feed.publish(now_ms, 0, "");
    let payload = feed.replay().get(from)?;
    Batch::decode(payload).ok()?.state().cloned()
}

#[test]
fn rest_is_told_at_once_and_is_no_stall() {
    let (mut engine, mut feed) = pair();
    assert!(beat(&mut feed, 1_000).is_some_and(|state| !state.asleep && !state.draining));
    assert_eq!(beat(&mut feed, 1_001), None, "the next one is not due");
    engine.counts(Counts { running: 1, waiting: 3, ..Counts::default() });
    engine.draining(true);
    let state = beat(&mut feed, 1_002);
    assert!(state.is_some_and(|state| state.draining && state.health == 0.0));
    engine.asleep(true);
    assert!(beat(&mut feed, 1_003).is_some_and(|state| state.asleep && state.draining));
    assert_eq!(beat(&mut feed, 1_004), None);
    let later = beat(&mut feed, 3_600_000);
    assert!(later.is_some_and(|state| state.stalled_ms == 0 && state.ailments == ["draining", "cold"]));
    engine.asleep(false);
    engine.draining(false);
    let awake = beat(&mut feed, 3_600_001);
    assert!(awake.is_some_and(|state| state.health > 0.8 && state.stalled_ms == 0));
}

#[test]
fn an_engine_that_works_and_does_not_step_falls() {
    let (mut engine, mut feed) = pair();
    beat(&mut feed, 0);
    engine.counts(Counts { running: 1, ..Counts::default() });
    let mut at = |engine: &mut Engine, now_ms, step: bool| {
        if step {
            engine.step_ended();
        }
        beat(&mut feed, now_ms).map(|state| (state.steps, state.stalled_ms, state.health < 0.3))
    };
    assert_eq!(at(&mut engine, 500_000, false), Some((0, 0, false)), "idle before: not late");
    assert_eq!(at(&mut engine, 501_000, true), Some((1, 0, false)));
    assert_eq!(at(&mut engine, 505_000, false), Some((1, 4_000, false)));
    assert_eq!(at(&mut engine, 511_000, false), Some((1, 10_000, true)));
    assert_eq!(at(&mut engine, 511_100, true), Some((2, 0, false)), "it was only slow");
}

#[test]
fn gpus_are_told_while_they_are_measured() {
    let (_, mut feed) = pair();
    let gpus = Gpus { count: 2, lost: 1, ..Gpus::default() };
    feed.measured(Some(Measured { utilization: Some(0.5), gpus: gpus.clone() }));
    let told = beat(&mut feed, 0).map(|state| (state.gpu_utilization, state.gpus, state.ailments));
    let ailments = vec!["gpu_lost".to_string(), "cold".to_string()];
    assert_eq!(told, Some((Some(0.5), Some(gpus), ailments)));
    feed.measured(None);
    assert!(beat(&mut feed, 200).is_some_and(|state| state.gpus.is_none() && state.ailments == ["cold"]));
}

#[test]
fn steps_make_adapters_loaded_in_their_order() {
    let (mut engine, mut feed) = pair();
    let mut now_ms = 0;
    let mut lists = |engine: &mut Engine, step: &[&str]| {
        step.iter().for_each(|id| engine.runs(id));
        engine.ran();
        engine.tell();
        now_ms += 100;
        beat(&mut feed, now_ms).map(|s| {
            [s.adapters, s.adapters_cached, s.adapters_running, s.adapters_waiting].map(|names| names.join(" "))
        })
    };
    let tokens = [1u32; 40];
    for (id, adapter) in [("1", "a"), ("2", "b"), ("3", ""), ("4", "c")] {
        let adapter_path = "";
        let request = Request { id, tokens: &tokens[..], prompt_tokens: 40, adapter, adapter_path, salt: "" };
        engine.arrived(&request, vec![], usize::MAX);
    }
    assert!(engine.adapted());
    let of = |loaded: &str, cached: &str, running: &str, waiting: &str| {
        Some([loaded, cached, running, waiting].map(String::from))
    };
    assert_eq!(lists(&mut engine, &["3"]), of("", "", "", "a b c"), "a step of the base model does nothing");
    engine.started("1");
    assert_eq!(lists(&mut engine, &["1", "3"]), of("a", "", "a", "b c"));
    engine.started("2");
    assert_eq!(lists(&mut engine, &["2", "3"]), of("b", "a", "a b", "c"));
    engine.adapter_done(crate::adapters::Doing::Add, "a");
    assert_eq!(lists(&mut engine, &["2"]), of("b", "a", "a b", "c"), "the step came after the load");
    engine.started("4");
    assert_eq!(lists(&mut engine, &["4"]), of("c", "b", "a b c", ""));
    ["1", "2", "4"].iter().for_each(|id| engine.finished(id, "stop"));
    assert!(!engine.adapted());
    assert_eq!(lists(&mut engine, &["3"]), of("c", "b", "", ""));
}

#[test]
fn b10_what_found_no_room_is_made_good_or_counted() {
    let (mut engine, mut feed) = pair();
    let tokens = [1u32; 40];
    let arrive = |engine: &mut Engine, id: &str, adapter: &str| {
        let adapter_path = "";
        let request = Request { id, tokens: &tokens[..], prompt_tokens: 40, adapter, adapter_path, salt: "" };
        engine.arrived(&request, vec![], usize::MAX);
        engine.looked_up(id, &tokens[..], 40, 0, false);
    };
    arrive(&mut engine, "stays", "a");
    engine.started("stays");
    // Nobody reads: each request writes some twenty words, and the ring has 65,536.
    for at in 0..10_000 {
        let id = format!("r{at}");
        arrive(&mut engine, &id, ["", "a", "b"][at % 3]);
        engine.started(&id);
        engine.cached(&id, &tokens[..], 0, 0, &[Some(at as u32 % 90), Some(90 + at as u32 % 10)]);
        engine.runs(&id);
        engine.ran();
        engine.evicted([at as u32 % 90].into_iter());
        engine.finished(&id, "stop");
        engine.step_ended();
    }
    engine.adapter_done(crate::adapters::Doing::Add, "c");
    arrive(&mut engine, "waits", "b");
    assert!(feed.owed());
    beat(&mut feed, 0);
    engine.tell();
    assert!(!feed.owed());
    let state = beat(&mut feed, 1_000).unwrap_or_else(|| panic!("no heartbeat"));
    assert_eq!((state.adapters_running, state.adapters_waiting), (vec!["a".to_string()], vec!["b".to_string()]));
    assert_eq!(state.adapters, ["c"], "it was loaded last");
    assert_eq!((state.counters.faults, state.unnamed), (0, 0));
    assert!(state.counters.untold > 1_000, "{}", state.counters.untold);
    engine.finished("waits", "abort");
    engine.finished("stays", "stop");
    let state = beat(&mut feed, 2_000).unwrap_or_else(|| panic!("no heartbeat"));
    assert!(state.adapters_running.is_empty() && state.adapters_waiting.is_empty());
}
