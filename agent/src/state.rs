//! The heartbeat, put together from what is known.

use crate::facts::{Counts, Facts};
use crate::follower::Follower;
use crate::record::within_limit;
use proto::block;
use proto::event::{Counters, KindDigest, MAX_LIST, State};
use proto::id::{EngineId, Epoch};

/// Who speaks, and under which names.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Name and rank.
    pub engine: EngineId,
    /// This process life.
    pub epoch: Epoch,
    /// The namespace's model.
    pub model: String,
    /// All names, the namespace's first.
    pub models: Vec<String>,
    /// The heartbeat's check.
    pub check: u64,
    /// `ip:port` of the engine's API server, "" when unknown.
    pub address: String,
}

impl Identity {
    /// `model` (from the settings) goes before the engine's own served names.
    pub fn new(name: &str, epoch: Epoch, facts: &Facts, model: Option<&str>, seed: u64) -> Self {
        let cut = |text: &str| within_limit(text).to_string();
        let mut models: Vec<String> = Vec::new();
        for name in model.into_iter().chain(facts.models.iter().map(String::as_str)).map(cut) {
            if !models.contains(&name) && models.len() < MAX_LIST {
                models.push(name);
            }
        }
        let model = models.first().cloned().unwrap_or_default();
        let check = block::check(&model, seed, facts.block_size);
        Self { engine: EngineId::new(name, facts.rank), epoch, model, models, check, address: String::new() }
    }
}

/// What is known of the engine's steps.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    /// Steps since the start.
    pub steps: u64,
    /// Milliseconds since the last one, when work waits.
    pub stalled_ms: u64,
}

/// The heartbeat at this moment.
pub fn state(
    identity: &Identity,
    facts: &Facts,
    follower: &Follower,
    counts: Counts,
    pace: Pace,
    bundle: &str,
    counters: Counters,
) -> State {
    let (adapters, adapters_waiting) = follower.adapters();
    State {
        engine: identity.engine.clone(),
        dp_size: facts.dp_size,
        address: identity.address.clone(),
        rank_header: facts.http.rank_header,
        models: identity.models.clone(),
        block_size: facts.block_size,
        check: identity.check,
        rule: facts.rule(),
        groups: facts.groups.clone(),
        digests: follower.sets().digests().map(|(kind, digest)| KindDigest { kind, digest }).collect(),
        running: counts.running,
        waiting: counts.waiting,
        backlog_tokens: counts.backlog_tokens,
        kv_use: counts.kv_use,
        max_num_seqs: facts.max_num_seqs,
        total_blocks: u64::from(facts.total_blocks),
        unnamed: follower.unnamed(),
        adapters,
        adapters_running: Vec::new(),
        adapters_waiting,
        adapters_cached: Vec::new(),
        max_adapters: facts.max_adapters,
        steps: pace.steps,
        stalled_ms: pace.stalled_ms,
        gpu_utilization: None,
        gpus: None,
        health: 1.0,
        ailments: Vec::new(),
        draining: false,
        asleep: false,
        agent: env!("CARGO_PKG_VERSION").to_string(),
        engine_version: facts.engine_version.clone(),
        bundle: bundle.to_string(),
        counters,
    }
}
