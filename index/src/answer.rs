//! What the index is asked and what it answers, in plain types: gRPC, HTTP and the embedded mode all speak these.

use proto::block::Fingerprint;
use proto::event::{HitRule, State};
use proto::fleet::Source;
use proto::id::{EngineId, Epoch, SetKind};
use proto::native::counters::Counters;
use std::sync::Arc;

/// Most fingerprints in one question or placement: 2^17 blocks are 2 million tokens at 16 tokens a block.
pub const MAX_FINGERPRINTS: usize = 1 << 17;

/// A prompt to be looked up.
#[derive(Debug, Clone, Copy)]
pub struct Query<'a> {
    /// Tokens a block; engines of another block size answer with nothing cached.
    pub block_size: u32,
    /// Tokens beyond its block that each fingerprint covers; engines with another look-ahead answer with nothing cached.
    pub ahead: u32,
    /// Tokens of the whole prompt, for the last-block rule.
    pub prompt_tokens: u32,
    /// Fingerprints of the full blocks, in order.
    pub fingerprints: &'a [Fingerprint],
    /// Engines (`name.rank`) to answer for; empty: all.
    pub candidates: &'a [String],
}

/// What one engine has of a prompt.
#[derive(Debug, Clone)]
pub struct EngineMatch {
    /// Everything known of the engine when it was looked up.
    pub status: Arc<Status>,
    /// Leading blocks reachable on GPU, credited: 0 while stale, mismatched, ...
    pub gpu_blocks: u32,
    /// Leading blocks reachable on GPU and lower tiers together, credited.
    pub any_blocks: u32,
    /// Tokens that the engine would take from its own cache for exactly this prompt.
    pub cached_tokens: u32,
    /// Leading blocks that are there or are coming by placements not yet done; never part of a prediction.
    pub coming_blocks: u32,
    /// By the reader's own clock.
    pub state: EngineState,
    /// Milliseconds since its last message was received; `u32::MAX` when none ever was.
    pub age_ms: u32,
    /// Placements that the engine has not yet seen arrive.
    pub reserved: Reserved,
}

/// The answer to a [`Query`].
#[derive(Debug, Clone, Default)]
pub struct Matched {
    /// One for each engine of the fleet (or each candidate), in the order of the fleet list.
    pub engines: Vec<EngineMatch>,
    /// Nanoseconds spent in the lookup itself.
    pub lookup_ns: u64,
}

/// What is reserved on one engine and not yet seen by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reserved {
    /// Placements.
    pub requests: u32,
    /// Their tokens to prefill.
    pub tokens: u64,
}

/// How far an engine's data can be trusted. Named as in `GET /v1/engines`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EngineState {
    /// Provably equal to the engine's own set at its last heartbeat.
    InStep,
    /// Waiting for a snapshot, a replay or a first heartbeat.
    Syncing,
    /// Three heartbeats missed.
    Late,
    /// Silent for `stale_after_ms`: credited nothing.
    Stale,
    /// A native stream with a hole that no replay closed.
    Partial,
    /// Silent for the lease, or never heard: nothing is held.
    Silent,
    /// Another seed, block size or version: credited nothing.
    Mismatched,
    /// A second process under one name; this is the one ignored.
    Conflict,
    /// Dropped because the index was over its byte budget.
    Shed,
}

impl EngineState {
    /// All of them, for metrics.
    pub const ALL: [EngineState; 9] = [
        EngineState::InStep,
        EngineState::Syncing,
        EngineState::Late,
        EngineState::Stale,
        EngineState::Partial,
        EngineState::Silent,
        EngineState::Mismatched,
        EngineState::Conflict,
        EngineState::Shed,
    ];

    /// The name used in JSON, logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            EngineState::InStep => "in_step",
            EngineState::Syncing => "syncing",
            EngineState::Late => "late",
            EngineState::Stale => "stale",
            EngineState::Partial => "partial",
            EngineState::Silent => "silent",
            EngineState::Mismatched => "mismatched",
            EngineState::Conflict => "conflict",
            EngineState::Shed => "shed",
        }
    }
}

/// After how long a silence an engine counts as what. All in milliseconds on the index's own clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leases {
    /// Shown as late: three heartbeats.
    pub late_ms: u64,
    /// Credited nothing.
    pub stale_ms: u64,
    /// Purged.
    pub lease_ms: u64,
}

impl Default for Leases {
    fn default() -> Self {
        Self { late_ms: 300, stale_ms: 1000, lease_ms: 30_000 }
    }
}

/// What was counted about one engine's stream since it is in the fleet list. All only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Messages taken, replayed ones included.
    pub messages: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
    /// Messages dropped because they were known already.
    pub stale: u64,
    /// Messages of an epoch that is not followed.
    pub foreign: u64,
    /// Frames that were no message of this protocol.
    pub bad: u64,
    /// Times that messages were missing.
    pub gaps: u64,
    /// Replays that closed a gap.
    pub replays: u64,
    /// Snapshots begun, by reason: [`ResyncReason`] is the position.
    pub resyncs: [u64; ResyncReason::ALL.len()],
    /// Digests compared.
    pub digest_checks: u64,
    /// Digests that differed.
    pub digest_failures: u64,
    /// Epochs followed.
    pub epochs: u64,
}

/// Why a snapshot was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResyncReason {
    /// First contact, or back after a purge.
    First,
    /// The engine started anew.
    Restart,
    /// More messages are missing than a replay gives, or the replay failed.
    Gap,
    /// A digest differed.
    Digest,
    /// The snapshot under way could not be finished: its cut was gone, or too much arrived meanwhile.
    Again,
}

impl ResyncReason {
    /// All of them.
    pub const ALL: [ResyncReason; 5] =
        [ResyncReason::First, ResyncReason::Restart, ResyncReason::Gap, ResyncReason::Digest, ResyncReason::Again];

    /// The name used in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            ResyncReason::First => "first",
            ResyncReason::Restart => "restart",
            ResyncReason::Gap => "gap",
            ResyncReason::Digest => "digest",
            ResyncReason::Again => "again",
        }
    }
}

/// Everything known of one engine at one moment. Times are milliseconds on the index's own clock.
#[derive(Debug, Clone)]
pub struct Status {
    /// `name.rank`: the name of the fleet entry, and its rank or the one that the heartbeat tells.
    pub engine: EngineId,
    /// The engine's number in the table.
    pub slot: u32,
    /// HTTP address: the fleet list's, else the agent's own word.
    pub address: Option<String>,
    /// Agent or the engine's own events.
    pub source: Source,
    /// State before ages are counted in: ask [`Status::state_at`].
    pub state: EngineState,
    /// Why it is mismatched, in conflict, shed or waiting; for people. "" when there is nothing to say.
    pub reason: String,
    /// The process life that is followed.
    pub epoch: Option<Epoch>,
    /// The next seq expected: everything before it is applied.
    pub next: u64,
    /// When the last message was received.
    pub heard_ms: Option<u64>,
    /// When the sets were last known to be up to the newest message.
    pub whole_ms: Option<u64>,
    /// By kind: may this set be credited, as far as the stream tells?
    pub credit: [bool; SetKind::COUNT],
    /// Proved equal at the last comparison; `None` where nothing can prove it.
    pub in_step: Option<bool>,
    /// The last heartbeat.
    pub heartbeat: Option<Arc<State>>,
    /// Tokens a block, 0 while unknown.
    pub block_size: u32,
    /// Members, by kind.
    pub blocks: [u64; SetKind::COUNT],
    /// The base model, where the fleet entry says it.
    pub model: Option<String>,
    /// The newest epoch that was ignored in favour of the one followed.
    pub ignored: Option<Epoch>,
    /// Counters of a stream of the engine's own events, by reason.
    pub native: Option<Box<Counters>>,
    /// Counters.
    pub tally: Tally,
}

/// How long a stream without heartbeats may be without a sign of life (a reading of the engine's metrics, or an open
/// connection where the fleet list has no address) before its engine counts as silent,
/// in milliseconds.
pub const NATIVE_SILENT_MS: u64 = 5000;

/// What a state is after so many milliseconds of silence.
pub fn state_after(state: EngineState, source: Source, age_ms: u64, leases: &Leases) -> EngineState {
    let heartbeats = source == Source::Agent;
    match state {
        _ if age_ms > leases.lease_ms || (!heartbeats && age_ms > NATIVE_SILENT_MS) => EngineState::Silent,
        // Quiet is not stale for a stream without heartbeats.
        EngineState::InStep | EngineState::Syncing | EngineState::Partial if heartbeats && age_ms > leases.stale_ms => {
            EngineState::Stale
        }
        EngineState::InStep if heartbeats && age_ms > leases.late_ms => EngineState::Late,
        state => state,
    }
}

impl Status {
    /// Milliseconds since the last message was received, `u32::MAX` when none was.
    pub fn age_ms(&self, now_ms: u64) -> u32 {
        self.heard_ms.map_or(u32::MAX, |at| now_ms.saturating_sub(at).min(u64::from(u32::MAX)) as u32)
    }

    /// The state with ages counted in. A reader asks this with its own clock, so an index whose writer hangs
    /// uncredits too.
    pub fn state_at(&self, now_ms: u64, leases: &Leases) -> EngineState {
        match self.heard_ms {
            None => EngineState::Silent,
            Some(at) => state_after(self.state, self.source, now_ms.saturating_sub(at), leases),
        }
    }

    /// May the members of this kind be credited now?
    pub fn credited(&self, kind: SetKind, now_ms: u64, leases: &Leases) -> bool {
        let fresh = match (self.source, self.whole_ms) {
            (Source::Native, _) => true,
            (Source::Agent, Some(at)) => now_ms.saturating_sub(at) <= leases.stale_ms,
            (Source::Agent, None) => false,
        };
        let trusted = matches!(
            self.state_at(now_ms, leases),
            EngineState::InStep | EngineState::Late | EngineState::Syncing | EngineState::Partial
        );
        fresh && trusted && self.credit[kind.index()]
    }

    /// Served names, the first one being the namespace's model.
    pub fn models(&self) -> &[String] {
        match (&self.heartbeat, &self.model) {
            (Some(state), _) if !state.models.is_empty() => &state.models,
            (_, Some(model)) => std::slice::from_ref(model),
            _ => &[],
        }
    }

    /// Tokens a block, 0 while unknown.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// How hits end on this engine.
    pub fn rule(&self) -> &HitRule {
        self.heartbeat.as_ref().map_or(&HitRule::Closed, |state| &state.rule)
    }

    /// Hex digest of its bundle, "" when it has none.
    pub fn bundle(&self) -> &str {
        self.heartbeat.as_ref().map_or("", |state| &state.bundle)
    }
}

/// A picker's decision, told so that every picker counts it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// `name.rank`.
    pub engine: String,
    /// The picker's request id: a UUID in its usual form of 36 characters.
    pub request_id: String,
    /// Blocks that the engine will hold once it has run this prompt, in order from the first.
    pub fingerprints: Vec<Fingerprint>,
    /// Tokens to prefill: prompt less predicted cached.
    pub tokens: u32,
}

/// Why a placement was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotReserved {
    /// Not 36 characters of a UUID.
    #[error("the request id {0:?} is no UUID, as in 0f8fad5b-d9cb-469f-a165-70867728950e")]
    BadId(String),
    /// No such engine in the fleet list.
    #[error("there is no engine {0:?} in the fleet list; engines are written name.rank")]
    NoEngine(String),
    /// More than [`MAX_FINGERPRINTS`].
    #[error("{0} fingerprints; at most 131072 are taken")]
    TooLong(usize),
    /// The book is full.
    #[error("{0} placements are open already; release what is done")]
    Full(usize),
}

/// A step in the life of a request that came from a picker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestLife {
    /// The picker's request id.
    pub request_id: String,
    /// The engine that told it.
    pub engine: EngineId,
    /// What happened.
    pub step: LifeStep,
}

/// What happened to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LifeStep {
    /// It entered the engine's scheduler.
    Arrived,
    /// It was scheduled for the first time.
    Started {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Tokens that the engine took from its own cache.
        cached_tokens: u32,
        /// What the agent's own set said at that instant.
        predicted_tokens: Option<u32>,
    },
    /// It ended, for this reason.
    Finished(String),
}

/// What a watcher of the fleet is told.
#[derive(Debug, Clone, Default)]
pub struct Update {
    /// Engines that are new or changed.
    pub engines: Vec<Arc<Status>>,
    /// Engines that left the fleet list.
    pub gone: Vec<EngineId>,
    /// Lives of requests that came from a picker.
    pub lives: Vec<RequestLife>,
    /// True when `engines` is the whole fleet: at first, and again when the watcher was too slow.
    pub whole: bool,
    /// Updates that the watcher missed before this one, their lives with them.
    pub missed: u64,
}

/// A model's tokenizer, template and limits, as its engines use them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle {
    /// Its hex digest, as the heartbeats name it.
    pub digest: String,
    /// JSON, as the agent made it.
    pub bytes: Arc<[u8]>,
}

/// Why there is no bundle to give.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoBundle {
    /// No engine serves this name.
    #[error("no engine of the fleet serves {0:?}")]
    NoModel(String),
    /// Engines serve it, and none has told of a bundle yet.
    #[error("the engines of {0:?} have no bundle yet")]
    NotYet(String),
    /// It is being fetched from an engine.
    #[error("the bundle of {0:?} is being fetched; ask again")]
    Fetching(String),
}
