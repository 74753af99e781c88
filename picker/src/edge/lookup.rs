//! The index, wherever it is: in another process, inside this one, or nowhere.

use super::embedded::Embedded;
use super::remote::Remote;
use crate::candidates::Found;
use crate::decisions::Started;
use crate::ledger::Id;
use crate::pool::Knowledge;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Most fingerprints asked for: 2^17 blocks are 2 million tokens at 16 tokens a block. What is beyond is not asked.
pub const MAX_FINGERPRINTS: usize = 1 << 17;
/// Most fingerprints told of a placement: half a million tokens at 16. Only coming blocks beyond it are not seen.
pub const MAX_RESERVED: usize = 1 << 15;

/// A prompt to be looked up.
#[derive(Debug, Clone)]
pub struct Question {
    /// `fp(-1)`.
    pub root: u64,
    /// Tokens a block.
    pub block_size: u32,
    /// Tokens beyond its block that each fingerprint covers.
    pub ahead: u32,
    /// Tokens of the whole prompt.
    pub prompt_tokens: u32,
    /// The full blocks.
    pub fingerprints: Vec<u64>,
}

/// A placement to be told.
#[derive(Debug, Clone)]
pub struct Placement {
    /// `name.rank`.
    pub engine: String,
    /// The picker's id.
    pub request_id: String,
    /// Blocks that the engine will hold, at most [`MAX_RESERVED`].
    pub fingerprints: Vec<u64>,
    /// Tokens to prefill.
    pub tokens: u32,
}

/// Why there is no answer, as a reason for degradation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoAnswer {
    /// No index is reached now.
    Away,
    /// It did not answer in time.
    Slow,
}

impl NoAnswer {
    /// The metric's label.
    pub fn label(self) -> &'static str {
        match self {
            NoAnswer::Away => "index_away",
            NoAnswer::Slow => "index_slow",
        }
    }
}

/// A step in the life of a request of this picker, or of another: the ledger knows its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Life {
    /// The picker's id.
    pub id: Id,
    /// What happened.
    pub step: LifeStep,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LifeStep {
    /// It is in the engine's own queue.
    Arrived,
    /// It was scheduled for the first time.
    Started(Started),
    /// It ended, for this reason.
    Finished(String),
}

/// What the index tells of the fleet.
#[derive(Debug, Clone, Default)]
pub struct News {
    /// Engines that are new or changed.
    pub engines: Vec<(String, Knowledge)>,
    /// Engines that left.
    pub gone: Vec<String>,
    /// Lives of requests.
    pub lives: Vec<Life>,
    /// Whether `engines` is the whole fleet.
    pub whole: bool,
    /// Different blocks that the index knows.
    pub nodes: u64,
}

/// Where news go. Called from one task at a time.
pub trait Follower: Send + Sync + 'static {
    /// The index tells something.
    fn told(&self, news: News);
    /// It is not followed any more.
    fn away(&self);
}

/// The index.
pub enum Index {
    /// Nowhere.
    None,
    /// Inside this process.
    Embedded(Embedded),
    /// One or more, by address.
    Remote(Remote),
}

impl Index {
    /// What each engine would take from its cache, by engine id.
    ///
    /// # Errors
    /// When nobody answers before the deadline; at once when nobody is there.
    pub async fn find(&self, question: Question, deadline: Instant) -> Result<HashMap<String, Found>, NoAnswer> {
        match self {
            Index::None => Err(NoAnswer::Away),
            Index::Embedded(index) => Ok(index.find(&question)),
            Index::Remote(index) => index.find(question, deadline).await,
        }
    }

    /// Tells of a placement; never waits.
    pub fn reserve(&self, placement: Placement) {
        match self {
            Index::None => {}
            Index::Embedded(index) => index.reserve(placement),
            Index::Remote(index) => index.reserve(placement),
        }
    }

    /// Takes a placement back; never waits.
    pub fn release(&self, request_id: String) {
        match self {
            Index::None => {}
            Index::Embedded(index) => index.release(&request_id),
            Index::Remote(index) => index.release(request_id),
        }
    }

    /// Placements and releases that could not be told, for the counters.
    pub fn untold(&self) -> u64 {
        match self {
            Index::Remote(index) => index.untold(),
            _ => 0,
        }
    }

    /// Follows the fleet for ever. The future is to be dropped at the end.
    pub async fn follow(&self, follower: Arc<dyn Follower>) {
        match self {
            Index::None => std::future::pending().await,
            Index::Embedded(index) => index.follow(&*follower).await,
            Index::Remote(index) => index.follow(&*follower).await,
        }
    }

    /// The bundle of a model: digest and bytes.
    ///
    /// # Errors
    /// Why there is none now, for the log.
    pub async fn bundle(&self, model: &str) -> Result<(String, Vec<u8>), String> {
        match self {
            Index::None => Err("there is no index".into()),
            Index::Embedded(index) => index.bundle(model),
            Index::Remote(index) => index.bundle(model).await,
        }
    }
}
