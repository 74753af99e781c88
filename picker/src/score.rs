//! What speaks for an engine: factors, each a value in [0,1], and their weighted sum.
//!
//! The five factors and their weights are the product's specification; see the tests for every number that users know.
//! More factors can be added as [`Scorer`]s without touching the pick.

use crate::pool::{Engine, State};
use std::sync::Arc;

/// Blocks that are only in a lower tier count this much of one on GPU: they have to be fetched first.
pub const LOWER_TIER: f64 = 0.8;
/// The load of an engine of which nothing is known: neither praised nor blamed.
pub const NEUTRAL_LOAD: f64 = 0.5;
/// What a scorer that fails is taken to have said.
pub const FAULT_VALUE: f64 = 0.5;

/// What scorers may know of a request. Never its text.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Asked {
    /// The model, by its first served name, or as the client wrote it where nobody is known to serve it.
    pub model: String,
    /// Adapter asked for, "" for none.
    pub adapter: String,
    /// Tokens of the prompt, 0 when unknown.
    pub prompt_tokens: usize,
    /// Headers, names in lower case.
    pub headers: Vec<(String, String)>,
    /// Milliseconds since the Unix epoch.
    pub time_ms: u64,
}

/// One engine as it looks to one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The engine.
    pub engine: Arc<Engine>,
    /// The index's view; `None` when it has none.
    pub state: Option<State>,
    /// Full blocks of the prompt that are named, in this engine's block size.
    pub blocks: u32,
    /// Leading blocks reachable on GPU.
    pub gpu_blocks: u32,
    /// Leading blocks reachable in all tiers.
    pub any_blocks: u32,
    /// Tokens that it would take from its cache, by the index.
    pub cached_tokens: u32,
    /// 0 idle to 1 full; `None` when unknown.
    pub load: Option<f64>,
    /// Requests waiting, and placements that have not arrived.
    pub queue: u32,
    /// Requests running.
    pub running: u32,
    /// Prompt tokens admitted or placed, and not yet computed.
    pub backlog_tokens: u64,
    /// 1 healthy, 0 failed.
    pub health: f64,
    /// Takes no new requests, and why.
    pub closed: Option<&'static str>,
    /// Whether the adapter asked for is loaded; true when none is asked for.
    pub adapter: bool,
    /// Age of the data, where there is some.
    pub age_ms: Option<u32>,
    /// Proved equal at its last heartbeat; `None` where nothing can prove it.
    pub in_step: Option<bool>,
}

impl Candidate {
    /// An engine of which nothing is known.
    pub fn unknown(engine: Arc<Engine>) -> Candidate {
        Candidate {
            engine,
            state: None,
            blocks: 0,
            gpu_blocks: 0,
            any_blocks: 0,
            cached_tokens: 0,
            load: None,
            queue: 0,
            running: 0,
            backlog_tokens: 0,
            health: 1.0,
            closed: None,
            adapter: true,
            age_ms: None,
            in_step: None,
        }
    }

    /// Share of the prompt that it holds, 0 to 1.
    pub fn cache(&self) -> f64 {
        if self.blocks == 0 {
            return 0.0;
        }
        let lower = self.any_blocks.saturating_sub(self.gpu_blocks);
        ((f64::from(self.gpu_blocks) + LOWER_TIER * f64::from(lower)) / f64::from(self.blocks)).clamp(0.0, 1.0)
    }

    /// Its load, or the neutral one.
    pub fn load_or_neutral(&self) -> f64 {
        self.load.unwrap_or(NEUTRAL_LOAD)
    }
}

/// Load of an engine: its GPU's utilization against the most that is wanted where the agent measures it, else the
/// greater of KV use and running requests against the most that may run.
pub fn load(gpu_utilization: Option<f32>, kv_use: f32, running: u32, max_num_seqs: u32, max_utilization: f64) -> f64 {
    let value = match gpu_utilization {
        Some(utilization) => f64::from(utilization) / max_utilization,
        None if max_num_seqs > 0 => f64::from(kv_use).max(f64::from(running) / f64::from(max_num_seqs)),
        None => f64::from(kv_use),
    };
    if value.is_finite() { value.clamp(0.0, 1.0) } else { 1.0 }
}

/// What a scorer says of one engine.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Opinion {
    /// 0 (worst) to 1 (best). Anything else, NaN too, is counted and taken for [`FAULT_VALUE`].
    pub value: f64,
    /// For the log.
    pub metadata: Vec<(&'static str, String)>,
}

impl From<f64> for Opinion {
    fn from(value: f64) -> Opinion {
        Opinion { value, metadata: Vec::new() }
    }
}

/// What scorers may know of the pool as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct View {
    /// Best cache factor of all candidates.
    pub best_cache: f64,
    /// Mean queue of the candidates.
    pub mean_queue: f64,
    /// The queue that counts as full.
    pub max_queue: u32,
}

/// One factor.
pub trait Scorer: Send + Sync + std::fmt::Debug {
    /// Its name, in logs and in the configuration.
    fn name(&self) -> &'static str;
    /// What it says of one engine for one request.
    fn score(&self, asked: &Asked, candidate: &Candidate, view: &View) -> Opinion;
}

/// The share of the prompt in cache.
#[derive(Debug)]
pub struct Cache;
/// Free capacity.
#[derive(Debug)]
pub struct LoadLeft;
/// Room in the queue.
#[derive(Debug)]
pub struct QueueLeft;
/// The engine's health.
#[derive(Debug)]
pub struct Health;
/// Whether the adapter is loaded.
#[derive(Debug)]
pub struct Adapter;
/// Prefers engines whose label `cost` (dollars an hour) is low, while their cache is within 20 points of the best.
#[derive(Debug)]
pub struct Cost;

impl Scorer for Cache {
    fn name(&self) -> &'static str {
        "cache"
    }
    fn score(&self, _: &Asked, candidate: &Candidate, _: &View) -> Opinion {
        candidate.cache().into()
    }
}

impl Scorer for LoadLeft {
    fn name(&self) -> &'static str {
        "load"
    }
    fn score(&self, _: &Asked, candidate: &Candidate, _: &View) -> Opinion {
        (1.0 - candidate.load_or_neutral()).into()
    }
}

impl Scorer for QueueLeft {
    fn name(&self) -> &'static str {
        "queue"
    }
    fn score(&self, _: &Asked, candidate: &Candidate, view: &View) -> Opinion {
        (1.0 - (f64::from(candidate.queue) / f64::from(view.max_queue.max(1))).min(1.0)).into()
    }
}

impl Scorer for Health {
    fn name(&self) -> &'static str {
        "health"
    }
    fn score(&self, _: &Asked, candidate: &Candidate, _: &View) -> Opinion {
        candidate.health.into()
    }
}

impl Scorer for Adapter {
    fn name(&self) -> &'static str {
        "adapter"
    }
    fn score(&self, _: &Asked, candidate: &Candidate, _: &View) -> Opinion {
        f64::from(u8::from(candidate.adapter)).into()
    }
}

/// Points of cache within which price decides.
const COST_CACHE_GAP: f64 = 0.20;
/// The price that scores 0: an on-demand A100.
const COST_DEAREST: f64 = 3.67;

impl Scorer for Cost {
    fn name(&self) -> &'static str {
        "cost"
    }
    fn score(&self, _: &Asked, candidate: &Candidate, view: &View) -> Opinion {
        let label = candidate.engine.labels.get("cost");
        // No label: no opinion. A label that is no number is a fault, and shown as one.
        let Some(label) = label else { return FAULT_VALUE.into() };
        let price: f64 = label.parse().unwrap_or(f64::NAN);
        let near = view.best_cache - candidate.cache() < COST_CACHE_GAP;
        // NaN passes through both.
        let value = if near { 1.0 - (price / COST_DEAREST).clamp(0.0, 1.0) } else { price.clamp(0.0, 0.0) };
        Opinion { value, metadata: vec![("cost", label.clone())] }
    }
}

/// The scorer of that name, for configurations.
pub fn by_name(name: &str) -> Option<Arc<dyn Scorer>> {
    match name {
        "cache" => Some(Arc::new(Cache)),
        "load" => Some(Arc::new(LoadLeft)),
        "queue" => Some(Arc::new(QueueLeft)),
        "health" => Some(Arc::new(Health)),
        "adapter" => Some(Arc::new(Adapter)),
        "cost" => Some(Arc::new(Cost)),
        _ => None,
    }
}

/// How much each of the five factors counts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weights {
    /// Share of the prompt in cache.
    pub cache: f64,
    /// Free capacity.
    pub load: f64,
    /// Room in the queue.
    pub queue: f64,
    /// Health.
    pub health: f64,
    /// Adapter loaded.
    pub adapter: f64,
}

impl Default for Weights {
    fn default() -> Self {
        Weights { cache: 0.60, load: 0.20, queue: 0.10, health: 0.05, adapter: 0.05 }
    }
}

/// Sets of weights that people can name, with the queue that counts as full.
pub const PRESETS: [(&str, Weights, u32); 5] = [
    ("default", Weights { cache: 0.60, load: 0.20, queue: 0.10, health: 0.05, adapter: 0.05 }, 20),
    ("latency-api", Weights { cache: 0.40, load: 0.15, queue: 0.30, health: 0.05, adapter: 0.10 }, 10),
    ("many-adapters", Weights { cache: 0.45, load: 0.20, queue: 0.10, health: 0.05, adapter: 0.20 }, 20),
    ("batch", Weights { cache: 0.70, load: 0.15, queue: 0.05, health: 0.05, adapter: 0.05 }, 35),
    ("low-reuse", Weights { cache: 0.30, load: 0.40, queue: 0.20, health: 0.05, adapter: 0.05 }, 20),
];

/// How far a sum of weights may be from 1.
pub const SUM_TOLERANCE: f64 = 1e-6;

/// Why weights are refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BadWeights {
    /// One is negative, above 1 or no number.
    #[error("the weight of {name} is {value}; it must be from 0 to 1")]
    Range {
        /// The factor.
        name: String,
        /// As given.
        value: f64,
    },
    /// They do not add up to 1.
    #[error("the weights sum to {sum:.6}, not to 1: lower or raise one by {:.6}", (1.0 - .sum).abs())]
    Sum {
        /// Their sum.
        sum: f64,
    },
    /// No scorer has that name.
    #[error("there is no scorer named {0:?}; there are cache, load, queue, health, adapter, cost")]
    NoScorer(String),
    /// A scorer is given twice.
    #[error("the scorer {0:?} is given twice")]
    Twice(String),
}

/// The factors of a policy with their weights, checked.
#[derive(Debug, Clone)]
pub struct Factors {
    list: Vec<(f64, Arc<dyn Scorer>)>,
}

impl Factors {
    /// The five factors, then `more` by name and weight.
    ///
    /// # Errors
    /// [`BadWeights`], when all weights together do not sum to 1 within [`SUM_TOLERANCE`], or a name is not known.
    pub fn new(weights: Weights, more: &[(String, f64)]) -> Result<Factors, BadWeights> {
        let five = [
            ("cache", weights.cache),
            ("load", weights.load),
            ("queue", weights.queue),
            ("health", weights.health),
            ("adapter", weights.adapter),
        ];
        let more = more.iter().map(|(name, weight)| (name.as_str(), *weight));
        let mut list: Vec<(f64, Arc<dyn Scorer>)> = Vec::new();
        for (name, value) in five.into_iter().chain(more) {
            if !(0.0..=1.0).contains(&value) {
                return Err(BadWeights::Range { name: name.into(), value });
            }
            if list.iter().any(|(_, scorer)| scorer.name() == name) {
                return Err(BadWeights::Twice(name.into()));
            }
            list.push((value, by_name(name).ok_or_else(|| BadWeights::NoScorer(name.into()))?));
        }
        Factors::of(list)
    }

    /// Any factors at all: the place for scorers of one's own.
    ///
    /// # Errors
    /// [`BadWeights`], when the weights do not sum to 1 within [`SUM_TOLERANCE`].
    pub fn of(list: Vec<(f64, Arc<dyn Scorer>)>) -> Result<Factors, BadWeights> {
        let sum: f64 = list.iter().map(|(weight, _)| weight).sum();
        // Written so that NaN is refused too.
        if (sum - 1.0).abs() <= SUM_TOLERANCE { Ok(Factors { list }) } else { Err(BadWeights::Sum { sum }) }
    }

    /// Names and weights, in order.
    pub fn weights(&self) -> impl Iterator<Item = (&'static str, f64)> + '_ {
        self.list.iter().map(|(weight, scorer)| (scorer.name(), *weight))
    }

    /// Values of all factors for one engine, their weighted sum, and how many of them were faults.
    pub fn score(&self, asked: &Asked, candidate: &Candidate, view: &View) -> Scored {
        let mut scored = Scored { values: Vec::with_capacity(self.list.len()), ..Scored::default() };
        for (weight, scorer) in &self.list {
            let opinion = scorer.score(asked, candidate, view);
            let value = if (0.0..=1.0).contains(&opinion.value) {
                opinion.value
            } else {
                scored.faults.push(scorer.name());
                FAULT_VALUE
            };
            scored.score += weight * value;
            scored.values.push((scorer.name(), value));
            scored.metadata.extend(opinion.metadata);
        }
        scored
    }
}

/// What the factors say of one engine.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Scored {
    /// The weighted sum.
    pub score: f64,
    /// Each factor's value.
    pub values: Vec<(&'static str, f64)>,
    /// Scorers that gave NaN or a value outside [0,1].
    pub faults: Vec<&'static str>,
    /// What scorers want in the log.
    pub metadata: Vec<(&'static str, String)>,
}
