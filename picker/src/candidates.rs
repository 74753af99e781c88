//! Engines as they look to one request: the pool, the index's answer and the ledger put together.

use crate::ledger::Ledger;
use crate::pool::{Load, Pool, State};
use crate::prepare::Prepared;
use crate::score::{Candidate, load};
use proto::fleet::Source;
use std::collections::HashMap;
use std::sync::Arc;

/// The index's answer for one engine.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// Tokens a block of the chain that was asked with.
    pub block_size: u32,
    /// Tokens beyond its block that each fingerprint covers.
    pub ahead: u32,
    /// Full blocks asked for.
    pub blocks: u32,
    /// Leading blocks on GPU.
    pub gpu_blocks: u32,
    /// Leading blocks in all tiers.
    pub any_blocks: u32,
    /// Tokens that the engine would take from its cache.
    pub cached_tokens: u32,
    /// The index's view.
    pub state: State,
    /// Age of its data.
    pub age_ms: u32,
    /// Proved equal at its last heartbeat.
    pub in_step: Option<bool>,
    /// Its load now.
    pub load: Load,
}

/// All engines as candidates, in the pool's order. `found` is by engine id; empty when the cache was not asked.
pub fn candidates(
    pool: &Pool,
    prepared: &Prepared,
    mut found: HashMap<String, Found>,
    ledger: &mut Ledger,
    now_ms: u64,
    max_utilization: f64,
) -> Vec<Candidate> {
    let mut out = Vec::with_capacity(pool.engines.len());
    for engine in &pool.engines {
        let mut candidate = Candidate::unknown(Arc::clone(engine));
        let known = engine.known.as_deref();
        // A chain of another size says nothing of this engine.
        let found = found
            .remove(&*engine.id)
            .filter(|f| known.is_none_or(|k| (k.block_size, k.ahead) == (f.block_size, f.ahead)));
        let told = pool.live.then_some(known).flatten();
        let (now, state) = match (&found, told) {
            // The pool's own check is never undone by the answer.
            (Some(found), Some(told)) if told.state == State::Mismatched => (Some(&found.load), Some(told.state)),
            (Some(found), _) => (Some(&found.load), Some(found.state)),
            (None, Some(told)) => (Some(&told.load), Some(told.state)),
            (None, None) => (None, None),
        };
        let counts = ledger.counts(&engine.id);
        let recent = ledger.recent(&engine.id, now_ms);
        candidate.state = state;
        candidate.adapter = prepared.adapter.is_empty() || now.is_some_and(|n| n.adapters.contains(&prepared.adapter));
        match now {
            Some(now) => {
                // Those of this picker are among the reserved, once the index has heard of them: the greater counts.
                // Native engines report no arrivals, so there a placement counts for a while.
                let coming = if engine.source == Source::Native { recent } else { now.reserved.max(counts.coming) };
                candidate.queue = now.waiting.saturating_add(coming);
                candidate.running = now.running;
                candidate.backlog_tokens = now.backlog_tokens + now.reserved_tokens.max(counts.coming_tokens);
                let utilization = now.gpu_utilization;
                candidate.load = Some(load(utilization, now.kv_use, now.running, now.max_num_seqs, max_utilization));
                candidate.health = f64::from(now.health);
                candidate.closed = match (now.draining, now.asleep) {
                    (true, _) => Some("draining"),
                    (_, true) => Some("asleep"),
                    _ => None,
                };
            }
            None => {
                candidate.queue = recent;
                candidate.running = counts.in_flight;
                candidate.backlog_tokens = counts.coming_tokens;
            }
        }
        if let Some(found) = found {
            candidate.blocks = found.blocks;
            candidate.age_ms = Some(found.age_ms);
            candidate.in_step = found.in_step;
            if !state.is_some_and(State::uncredited) {
                candidate.gpu_blocks = found.gpu_blocks;
                candidate.any_blocks = found.any_blocks.max(found.gpu_blocks);
                candidate.cached_tokens = found.cached_tokens;
            }
        }
        if prepared.skips_cache {
            (candidate.gpu_blocks, candidate.any_blocks, candidate.cached_tokens) = (0, 0, 0);
        }
        if state.is_some_and(State::uncredited) {
            candidate.load = Some(1.0);
        }
        out.push(candidate);
    }
    out
}

/// Whether a candidate serves the model of a request. One whose models are unknown may.
pub fn serves(prepared: &Prepared, candidate: &Candidate) -> bool {
    !prepared.known_model || candidate.engine.base_model().is_none_or(|model| model == prepared.model)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{Knowledge, Sources};

    fn pool(live: bool, state: State) -> Pool {
        let mut sources = Sources::default();
        let yaml = r#"[{"name":"a","address":"127.0.0.1:1"},{"name":"b","address":"127.0.0.1:2"}]"#;
        sources.fleet(serde_json::from_str(yaml).unwrap_or_default());
        let knowledge = Knowledge {
            state,
            reason: String::new(),
            models: vec!["tiny".into()],
            block_size: 16,
            ahead: 0,
            load: busy(),
            bundle: String::new(),
            address: None,
            rank_header: None,
            check: 0,
        };
        sources.told(vec![("a.0".into(), knowledge)], &[], true);
        if !live {
            sources.away();
        }
        sources.pool()
    }

    fn busy() -> Load {
        Load {
            running: 4,
            waiting: 2,
            reserved: 3,
            max_num_seqs: 8,
            health: 1.0,
            adapters: vec!["lora".into()],
            ..Load::default()
        }
    }

    fn found(state: State) -> HashMap<String, Found> {
        let found = Found {
            block_size: 16,
            ahead: 0,
            blocks: 4,
            gpu_blocks: 2,
            any_blocks: 3,
            cached_tokens: 48,
            state,
            age_ms: 5,
            in_step: Some(true),
            load: busy(),
        };
        HashMap::from([("a.0".to_string(), found)])
    }

    fn look(pool: &Pool, found: HashMap<String, Found>, ledger: &mut Ledger) -> Vec<Candidate> {
        candidates(pool, &Prepared::default(), found, ledger, 0, 1.0)
    }

    #[test]
    fn queues_count_placements_that_have_not_arrived_once() {
        let mut ledger = Ledger::default();
        let pool = pool(true, State::InStep);
        assert_eq!(look(&pool, found(State::InStep), &mut ledger)[0].queue, 5);
        (0..3).for_each(|id| drop(ledger.place(id, &pool.engines[0].id, 1, 0)));
        assert_eq!(look(&pool, found(State::InStep), &mut ledger)[0].queue, 5, "the index has heard of them");
        (3..5).for_each(|id| drop(ledger.place(id, &pool.engines[0].id, 1, 0)));
        assert_eq!(look(&pool, found(State::InStep), &mut ledger)[0].queue, 7, "and not yet of these");
    }

    #[test]
    fn an_engine_without_knowledge_is_neutral() {
        let mut ledger = Ledger::default();
        let pool = pool(true, State::InStep);
        let all = look(&pool, found(State::InStep), &mut ledger);
        assert_eq!((all[1].load, all[1].cache(), all[1].queue, all[1].health), (None, 0.0, 0, 1.0));
        assert!(serves(&Prepared { known_model: true, model: "other".into(), ..Prepared::default() }, &all[1]));
        assert!(!serves(&Prepared { known_model: true, model: "other".into(), ..Prepared::default() }, &all[0]));
    }

    #[test]
    fn stale_and_mismatched_engines_have_no_cache_and_full_load() {
        let mut ledger = Ledger::default();
        for state in [State::Stale, State::Mismatched] {
            let all = look(&pool(true, State::InStep), found(state), &mut ledger);
            assert_eq!((all[0].load, all[0].cache(), all[0].cached_tokens), (Some(1.0), 0.0, 0), "{state:?}");
        }
        let all = look(&pool(true, State::Mismatched), found(State::InStep), &mut ledger);
        assert_eq!((all[0].state, all[0].cache()), (Some(State::Mismatched), 0.0));
        let late = look(&pool(true, State::InStep), found(State::Late), &mut ledger);
        assert_eq!((late[0].load, late[0].cached_tokens), (Some(0.5), 48));
    }

    #[test]
    fn when_the_index_is_away_only_own_placements_count() {
        let mut ledger = Ledger::default();
        let pool = pool(false, State::InStep);
        ledger.place(1, &pool.engines[0].id, 10, 0);
        let all = look(&pool, HashMap::new(), &mut ledger);
        assert_eq!((all[0].queue, all[0].running, all[0].load, all[0].state), (1, 1, None, None));
        assert_eq!(all[1].queue, 0);
    }

    #[test]
    fn another_block_size_says_nothing() {
        let mut other = found(State::InStep);
        other.values_mut().for_each(|f| f.block_size = 32);
        let all = look(&pool(true, State::InStep), other, &mut Ledger::default());
        assert_eq!((all[0].blocks, all[0].cached_tokens, all[0].running), (0, 0, 4));
    }

    #[test]
    fn adapters_are_loaded_or_not() {
        let prepared = Prepared { adapter: "lora".into(), ..Prepared::default() };
        let pool = pool(true, State::InStep);
        let all = candidates(&pool, &prepared, HashMap::new(), &mut Ledger::default(), 0, 1.0);
        assert_eq!((all[0].adapter, all[1].adapter), (true, false));
    }
}
