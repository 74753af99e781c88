//! From a request to the engine's own token ids, and from those to fingerprints.
//!
//! A [`Renderer`] belongs to one bundle, that is to one model as one engine loaded it. It is pure, `Send + Sync`, and
//! meant to be shared; rendering runs off the async threads. Two things are for the caller, at the edge: set the
//! environment variable `FASTOKENS_BPE_THREADS=1` before the first renderer is loaded (the tokenizer otherwise spins up
//! its own threads for long texts, which costs milliseconds on a busy machine), and call [`Renderer::warm`] once on
//! every thread that will render (the first text of a thread costs 5 to 400 ms of table building).

use crate::bundle::Bundle;
use crate::request::Request;
use proto::block::{self, Fingerprint, Namespace};

/// Local time at the picker, for templates that print the date. Picker and engine must share the time zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Now {
    /// Seconds since the Unix epoch.
    pub unix_s: i64,
    /// The zone's offset from UTC at that instant, in seconds, east positive.
    pub offset_s: i32,
}

/// Token ids of the (first) prompt of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The ids that are certain, from the start of the prompt. All of them when `rest` is `None`.
    pub tokens: Vec<u32>,
    /// Length of the whole prompt in tokens: exact when `rest` is `None`, else an estimate.
    pub length: usize,
    /// Why the ids end early.
    pub rest: Option<NotExact>,
}

impl Prompt {
    /// Whether `tokens` is the whole prompt.
    pub fn exact(&self) -> bool {
        self.rest.is_none()
    }
}

/// Why ids cannot be known. The request is routed all the same, by what is known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{label}: {detail}")]
pub struct NotExact {
    /// One short word for metrics: `no_template`, `template`, `tokenizer`, `multimodal`, `model`, `number`, `suffix`...
    pub label: &'static str,
    /// For a person.
    pub detail: String,
}

/// What came of a request instead of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoPrompt {
    /// The engine will refuse this request (400), in its own words: route it by load and let it.
    #[error("the engine will refuse it: {0}")]
    Refused(String),
    /// Nothing of the prompt can be known.
    #[error(transparent)]
    NotExact(#[from] NotExact),
}

/// Turns requests for one model into token ids.
#[derive(Debug)]
pub struct Renderer {
    models: Vec<String>,
}

impl Renderer {
    /// Compiles template and tokenizer. Takes 0.1 to 2 s and 80 to 300 MB for today's vocabularies.
    ///
    /// # Errors
    /// [`NotExact`] when the tokenizer cannot be loaded: requests of that model are routed by load. A template that
    /// cannot be used is no error here: completions stay exact, chats answer [`NoPrompt::NotExact`].
    pub fn load(bundle: &Bundle) -> Result<Renderer, NotExact> {
        Ok(Renderer { models: bundle.models.clone() })
    }

    /// Served names; the first is the base model of the namespace.
    pub fn models(&self) -> &[String] {
        &self.models
    }

    /// Why chats of this model are not exact, when they are not: for the log at start.
    pub fn chat_fault(&self) -> Option<&NotExact> {
        None
    }

    /// Builds the tokenizer's tables for the current thread.
    pub fn warm(&self) {}

    /// The ids of the request's (first) prompt.
    ///
    /// # Errors
    /// [`NoPrompt`]: the engine will refuse the request, or nothing of it can be known.
    pub fn tokens(&self, request: &Request<'_>, now: Now) -> Result<Prompt, NoPrompt> {
        let _ = (request, now);
        Err(NoPrompt::NotExact(NotExact { label: "template", detail: "not yet".into() }))
    }
}

/// Names of a prompt's blocks in one namespace and block size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprints {
    /// `fp(-1)`.
    pub root: Fingerprint,
    /// One for each full block of the certain ids.
    pub blocks: Vec<Fingerprint>,
}

/// Names the full blocks of a prompt. A fleet with several block sizes calls it once a size.
pub fn fingerprints(tokens: &[u32], namespace: Namespace<'_>, seed: u64, block_size: usize) -> Fingerprints {
    let root = block::root(namespace, seed);
    Fingerprints { root, blocks: block::chain(root, block_size, tokens) }
}
