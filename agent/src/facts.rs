//! What the engine tells about itself: once at the start, and once a step.

use crate::address::Http;
use crate::gpus::Share;
use crate::plan::Plan;
use proto::event::{Group, HitRule};

/// What does not change while the engine lives.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Data-parallel rank: added to the ports, and part of the engine's name.
    pub rank: u32,
    /// Data-parallel size.
    pub dp_size: u32,
    /// Served names; the first is the namespace's unless `KVATLAS_MODEL` says another.
    pub models: Vec<String>,
    /// Tokens from one fingerprint to the next: the engine's hash block size.
    pub block_size: u32,
    /// Physical blocks of the pool: block ids are below it.
    pub total_blocks: u32,
    /// Most requests that may run at once, 0 if unknown.
    pub max_num_seqs: u32,
    /// Most adapters at once, 0 without LoRA.
    pub max_adapters: u32,
    /// Most adapters in the host's memory, those of the GPU among them.
    pub max_cached_adapters: u32,
    /// Which of the visible GPUs are this engine's.
    pub share: Share,
    /// Is it known how hits end? Otherwise nothing is published of the blocks.
    pub known: bool,
    /// What is published of which group, and how hits end.
    pub plan: Plan,
    /// The engine's KV cache groups.
    pub groups: Vec<Group>,
    /// The engine's version.
    pub engine_version: String,
    /// The engine's API server.
    pub http: Http,
}

impl Facts {
    /// The rule by which this engine's hits end.
    pub fn rule(&self) -> HitRule {
        match self.known {
            false => HitRule::Unknown,
            true if self.plan.hits.is_plain() => HitRule::Closed,
            true => HitRule::Sets(Box::new(self.plan.hits.clone())),
        }
    }

    /// An engine with one full-attention group, as most models have it.
    pub fn plain(model: &str, block_size: u32, total_blocks: u32) -> Self {
        Self {
            rank: 0,
            dp_size: 1,
            models: vec![model.to_string()],
            block_size,
            total_blocks,
            max_num_seqs: 0,
            max_adapters: 0,
            max_cached_adapters: 0,
            share: Share::default(),
            known: true,
            plan: Plan::plain(block_size, [0, 32, 0]),
            groups: vec![Group { kind: "full_attention".to_string(), block_size, window: 0 }],
            engine_version: String::new(),
            http: Http::default(),
        }
    }
}

/// What changes with every step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Counts {
    /// Requests running.
    pub running: u32,
    /// Requests waiting.
    pub waiting: u32,
    /// Prompt tokens admitted and not yet computed; the agent counts them itself, what the engine says is not used.
    pub backlog_tokens: u64,
    /// Share of KV blocks in use by live requests, 0 to 1.
    pub kv_use: f32,
}
