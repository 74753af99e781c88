//! The heartbeat, put together from what is known.

use crate::facts::{Counts, Facts};
use crate::follower::Follower;
use crate::gpus::Measured;
use crate::health::{Vitals, score};
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

/// What is known of the engine beside its counts.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace<'a> {
    /// Steps since the start.
    pub steps: u64,
    /// Milliseconds without a step while work waits.
    pub stalled_ms: u64,
    /// It sleeps.
    pub asleep: bool,
    /// It takes no new requests.
    pub draining: bool,
    /// What is measured of its GPUs, if anything is.
    pub measured: Option<&'a Measured>,
}

/// The heartbeat at this moment.
pub fn state(
    identity: &Identity,
    facts: &Facts,
    follower: &Follower,
    counts: Counts,
    pace: Pace<'_>,
    bundle: &str,
    counters: Counters,
) -> State {
    let digests: Vec<KindDigest> =
        follower.sets().digests().map(|(kind, digest)| KindDigest { kind, digest }).collect();
    // Of several kinds of attention the one that holds most: each has its own blocks of the pool.
    let most = digests.iter().map(|one| one.digest.count).max().unwrap_or(0);
    let gpus = pace.measured.map(|measured| measured.gpus.clone());
    let health = score(&Vitals {
        draining: pace.draining,
        asleep: pace.asleep,
        stalled_ms: pace.stalled_ms,
        kv_use: counts.kv_use,
        warmth: (facts.known && facts.total_blocks > 0).then(|| most as f32 / facts.total_blocks as f32),
        gpus: gpus.as_ref(),
    });
    let adapters = follower.adapters();
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
        digests,
        running: counts.running,
        waiting: counts.waiting,
        backlog_tokens: counts.backlog_tokens,
        kv_use: counts.kv_use,
        max_num_seqs: facts.max_num_seqs,
        total_blocks: u64::from(facts.total_blocks),
        unnamed: follower.unnamed(),
        adapters: adapters.loaded.clone(),
        adapters_running: adapters.running.clone(),
        adapters_waiting: adapters.waiting.clone(),
        adapters_cached: adapters.cached.clone(),
        max_adapters: facts.max_adapters,
        steps: pace.steps,
        stalled_ms: pace.stalled_ms,
        gpu_utilization: pace.measured.and_then(|measured| measured.utilization),
        gpus,
        health: health.score,
        ailments: health.ailments.into_iter().map(str::to_string).collect(),
        draining: pace.draining,
        asleep: pace.asleep,
        agent: env!("CARGO_PKG_VERSION").to_string(),
        engine_version: facts.engine_version.clone(),
        bundle: bundle.to_string(),
        counters,
    }
}
