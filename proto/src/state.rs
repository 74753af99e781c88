//! What an engine says of itself in a heartbeat.

use crate::digest::Digest;
use crate::event::{BadBatch, MAX_LIST, MAX_TEXT_BYTES};
use crate::hit::Hits;
use crate::id::{EngineId, SetKind};
use serde::{Deserialize, Serialize};

/// The heartbeat. Sent at least once an interval (100 ms by default), also by an idle engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Pod and data-parallel rank, as the agent was told.
    pub engine: EngineId,
    /// Data-parallel size.
    #[serde(default)]
    pub dp_size: u32,
    /// `ip:port` by which a gateway reaches the engine's API server, "" when the agent does not know it.
    #[serde(default)]
    pub address: String,
    /// What to ask for in the header `X-data-parallel-rank` there; absent where that address has this rank alone.
    #[serde(default)]
    pub rank_header: Option<u32>,
    /// All names under which the model is served, the first one being the namespace's.
    pub models: Vec<String>,
    /// Tokens a block.
    pub block_size: u32,
    /// [`crate::block::check`] of the first name, the seed and the block size.
    pub check: u64,
    /// The rule by which this engine's hits end.
    #[serde(default)]
    pub rule: HitRule,
    /// The engine's KV cache groups.
    #[serde(default)]
    pub groups: Vec<Group>,
    /// Digest of each kind of set at this seq, after the operations before it in the batch.
    pub digests: Vec<KindDigest>,
    /// Requests running.
    pub running: u32,
    /// Requests waiting.
    pub waiting: u32,
    /// Prompt tokens that are admitted and not yet computed, running and waiting.
    #[serde(default)]
    pub backlog_tokens: u64,
    /// Share of KV blocks in use by live requests, 0 to 1.
    pub kv_use: f32,
    /// Most requests that may run at once, 0 if unknown.
    #[serde(default)]
    pub max_num_seqs: u32,
    /// Blocks of the GPU pool.
    #[serde(default)]
    pub total_blocks: u64,
    /// Cached blocks whose tokens the agent cannot know.
    #[serde(default)]
    pub unnamed: u64,
    /// Adapters thought to be in a GPU slot, running or not; sorted.
    #[serde(default)]
    pub adapters: Vec<String>,
    /// Adapters of requests that run; sorted. While there are `max_adapters` of them, requests of others wait.
    #[serde(default)]
    pub adapters_running: Vec<String>,
    /// Adapters that waiting requests ask for; sorted.
    #[serde(default)]
    pub adapters_waiting: Vec<String>,
    /// Adapters thought to be in the host's memory and in no GPU slot: a copy away; sorted.
    #[serde(default)]
    pub adapters_cached: Vec<String>,
    /// Most adapters at once, 0 without LoRA.
    #[serde(default)]
    pub max_adapters: u32,
    /// Engine steps since the process started.
    #[serde(default)]
    pub steps: u64,
    /// Milliseconds since the last step while work waits; 0 when none waits.
    #[serde(default)]
    pub stalled_ms: u64,
    /// GPU utilization 0 to 1, where it can be measured; the mean over the engine's GPUs.
    #[serde(default)]
    pub gpu_utilization: Option<f32>,
    /// What is measured of the engine's GPUs, where it can be.
    #[serde(default)]
    pub gpus: Option<Gpus>,
    /// 1 = healthy, below 0.3 no new requests, 0 = draining or failed.
    #[serde(default = "one")]
    pub health: f32,
    /// What lowers the health, the worst first: `stalled`, `gpu_hot`, ...
    #[serde(default)]
    pub ailments: Vec<String>,
    /// The engine takes no new requests.
    #[serde(default)]
    pub draining: bool,
    /// The engine sleeps (its cache is gone).
    #[serde(default)]
    pub asleep: bool,
    /// Version of the agent.
    #[serde(default)]
    pub agent: String,
    /// Version of the engine.
    #[serde(default)]
    pub engine_version: String,
    /// Hex digest of the bundle that the control socket serves, "" when there is none yet.
    #[serde(default)]
    pub bundle: String,
    /// The agent's own counters.
    #[serde(default)]
    pub counters: Counters,
}

impl State {
    /// Is every list, text and number within its limit?
    ///
    /// # Errors
    /// The first that is not.
    pub fn check(&self) -> Result<(), BadBatch> {
        let text = |what, text: &str| if text.len() > MAX_TEXT_BYTES { Err(BadBatch::Limit(what)) } else { Ok(()) };
        let list = |what, len: usize| if len > MAX_LIST { Err(BadBatch::Limit(what)) } else { Ok(()) };
        list("groups", self.groups.len())?;
        list("digests", self.digests.len())?;
        let throttled = self.gpus.as_ref().map_or(&[][..], |gpus| &gpus.throttled);
        for (what, names) in [
            ("served names", &self.models[..]),
            ("adapters", &self.adapters),
            ("adapters running", &self.adapters_running),
            ("adapters waiting", &self.adapters_waiting),
            ("adapters cached", &self.adapters_cached),
            ("ailments", &self.ailments),
            ("throttle reasons", throttled),
        ] {
            list(what, names.len())?;
            names.iter().try_for_each(|name| text("name", name))?;
        }
        for one in [&self.agent, &self.engine_version, &self.bundle, &self.address] {
            text("version", one)?;
        }
        if let HitRule::Sets(hits) = &self.rule {
            if let Some(what) = hits.fault() {
                return Err(BadBatch::Limit(what));
            }
            if hits.unit != self.block_size {
                return Err(BadBatch::Limit("the unit of its hits"));
            }
        }
        if self.block_size == 0 || self.block_size > 1 << 16 {
            return Err(BadBatch::Limit("block size"));
        }
        let memory = self.gpus.as_ref().map_or(0.0, |gpus| gpus.memory_use);
        let numbers = [self.kv_use, self.health, self.gpu_utilization.unwrap_or(0.0), memory];
        if numbers.iter().any(|n| !n.is_finite()) {
            return Err(BadBatch::Limit("a share that is no number"));
        }
        Ok(())
    }
}

fn one() -> f32 {
    1.0
}

/// What is measured of the GPUs of one engine, about once a second. Of several the worst counts.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpus {
    /// How many there are on this host.
    pub count: u32,
    /// How many of them do not answer any more: fallen off the bus, or in need of a reset.
    pub lost: u32,
    /// Share of memory that is taken, by whomever; of the fullest.
    pub memory_use: f32,
    /// Degrees Celsius of the hottest, 0 if unknown.
    pub temperature_c: u32,
    /// Why clocks are lowered, on any of them: `thermal`, `hw_thermal`, `hw_slowdown`, `power_brake`, `power_cap`.
    pub throttled: Vec<String>,
    /// Corrected memory errors since the driver was loaded; of the worst.
    pub ecc_corrected: u64,
    /// Memory errors that were not corrected, since the driver was loaded; of the worst.
    pub ecc_uncorrected: u64,
    /// Those of them that came while the agent looked.
    pub ecc_new: u64,
}

/// What an agent counts about itself. All only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Exceptions caught in hooks.
    pub faults: u64,
    /// Steps in the lives of requests that are not told, because the agent's thread got no time for long.
    pub untold: u64,
    /// Snapshots cut.
    pub snapshots: u64,
    /// Replays answered.
    pub replays: u64,
    /// Messages not handed to the socket, because readers lag (their seqs are consumed).
    pub dropped: u64,
    /// Reports of tiers below the GPU about blocks that the agent does not know.
    pub unknown_below: u64,
    /// Reports of media that the agent does not know; their blocks count as below, never as on the GPU.
    pub unknown_media: u64,
    /// Times that the publishing socket was renewed because a reader lagged.
    pub renewals: u64,
}

/// One KV cache group of the engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// The engine's name of the kind: full_attention, sliding_window, mamba, ...
    pub kind: String,
    /// Tokens a block of this group.
    pub block_size: u32,
    /// Window or chunk in tokens, 0 for none.
    #[serde(default)]
    pub window: u32,
}

/// How a hit's length follows from the sets.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HitRule {
    /// One group of full attention: the closed prefix, never the last token.
    #[default]
    Closed,
    /// By [`crate::hit::find`] over the sets that these name.
    Sets(Box<Hits>),
    /// Not known to this agent: credited nothing, and said.
    Unknown,
}

impl HitRule {
    /// Tokens beyond its block that each fingerprint covers.
    pub fn ahead(&self) -> u32 {
        match self {
            HitRule::Sets(hits) => hits.ahead,
            _ => 0,
        }
    }
}

/// Digest of one kind of set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindDigest {
    /// Which set.
    pub kind: SetKind,
    /// Its digest.
    pub digest: Digest,
}
