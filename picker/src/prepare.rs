//! From a body to what the index is asked: parse, find the model, render, tokenize, fingerprint. One job, off the async
//! threads; only names of blocks and counts leave it.

use crate::pool::{Meaning, Pool};
use crate::prompt::{self, NoPrompt, Now, Renderer};
use crate::request::{BadBody, Kind, Limits, Request};
use proto::block::{Fingerprint, Namespace};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Loaded renderers by base model.
pub type Renderers = HashMap<String, Arc<Renderer>>;

/// Most block sizes (and look-aheads) of one pool that are named: one chain each.
pub const MAX_BLOCK_SIZES: usize = 4;

/// Names of one prompt's blocks in one block size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Tokens a block.
    pub block_size: u32,
    /// Tokens beyond its block that each fingerprint covers.
    pub ahead: u32,
    /// `fp(-1)`.
    pub root: Fingerprint,
    /// The full blocks.
    pub fingerprints: Vec<Fingerprint>,
}

/// Ends of the paths whose requests enter an engine's scheduler. Others (lists of models, /tokenize, health) are answered
/// beside it: counting them as coming would make an idle engine look busy until they expire.
const GENERATING: [&str; 11] = [
    "/completions",
    "/responses",
    "/messages",
    "/embeddings",
    "/generate",
    "/pooling",
    "/score",
    "/rerank",
    "/classify",
    "/transcriptions",
    "/translations",
];

/// Whether requests of that path enter an engine's scheduler.
pub fn generates(path: &str) -> bool {
    let path = path.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
    GENERATING.iter().any(|end| path.ends_with(end))
}

/// [`Prepared::degraded`] when the engine will answer with an error of its own.
pub const REFUSED: &str = "engine_refuses";

/// What became of a body.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Prepared {
    /// The base model's first name, or the name as written where nobody is known to serve it.
    pub model: String,
    /// The adapter, "" for none.
    pub adapter: String,
    /// Whether the pool knows who serves that model: others are then no candidates.
    pub known_model: bool,
    /// Tokens of the prompt, exact or estimated; 0 when nothing is known.
    pub prompt_tokens: u32,
    /// Whether `prompt_tokens`, and so a prediction, is exact.
    pub exact: bool,
    /// One for each block size of the pool; empty when the cache cannot be asked.
    pub chains: Vec<Chain>,
    /// Why there are no chains, or none to the prompt's end: one word.
    pub degraded: Option<&'static str>,
    /// For people: the same in full.
    pub detail: String,
    /// The engine starts several requests for it.
    pub several: bool,
    /// The engine will not read its cache for it.
    pub skips_cache: bool,
}

/// What a preparation depends on beside the body.
#[derive(Debug, Clone)]
pub struct Means {
    /// The engines.
    pub pool: Arc<Pool>,
    /// Renderers of the moment.
    pub renderers: Arc<Renderers>,
    /// Adapters of the configuration: (adapter, base model).
    pub adapters: Arc<Vec<(String, String)>>,
    /// The deployment's seed.
    pub seed: u64,
    /// Local time, for templates.
    pub now: Now,
    /// Bounds on the body.
    pub limits: Limits,
}

/// Prepares one body.
///
/// # Errors
/// [`BadBody`], when the client has to be told that its body cannot be read.
pub fn prepare(kind: Kind, body: &[u8], means: &Means) -> Result<Prepared, BadBody> {
    let request = Request::parse(kind, body, means.limits)?;
    let name = match request.model.as_deref() {
        Some(name) => name,
        None => means.pool.only_model().unwrap_or_default(),
    };
    let mut prepared = Prepared {
        several: request.n > 1 || request.prompts > 1,
        skips_cache: request.skips_cache,
        ..Prepared::default()
    };
    match means.pool.meaning(name, &means.adapters) {
        Meaning::Base(base) => prepared.model = base,
        Meaning::Adapter { base, adapter } => (prepared.model, prepared.adapter) = (base, adapter),
        Meaning::Unknown => {
            prepared.model = name.to_owned();
            return Ok(degrade(prepared, "unknown_model", format!("no engine is known to serve {name:?}")));
        }
    }
    prepared.known_model = true;
    let Some(renderer) = means.renderers.get(&prepared.model) else {
        let detail = format!("no tokenizer of {:?} is loaded yet", prepared.model);
        return Ok(degrade(prepared, "no_bundle", detail));
    };
    let prompt = match renderer.tokens(&request, means.now) {
        Ok(prompt) => prompt,
        Err(NoPrompt::Refused(detail)) => return Ok(degrade(prepared, REFUSED, detail)),
        Err(NoPrompt::NotExact(why)) => return Ok(degrade(prepared, why.label, why.detail)),
    };
    prepared.prompt_tokens = u32::try_from(prompt.length).unwrap_or(u32::MAX);
    prepared.exact = prompt.exact();
    if let Some(rest) = &prompt.rest {
        prepared = degrade(prepared, rest.label, rest.detail.clone());
    }
    let salt: &str = &request.cache_salt;
    let sizes: BTreeSet<(u32, u32)> = sizes(&means.pool, &prepared.model);
    for (block_size, ahead) in sizes.into_iter().take(MAX_BLOCK_SIZES) {
        let namespace = Namespace { model: &prepared.model, adapter: &prepared.adapter, salt };
        let named = prompt::fingerprints(&prompt.tokens, namespace, means.seed, (block_size as usize, ahead as usize));
        prepared.chains.push(Chain { block_size, ahead, root: named.root, fingerprints: named.blocks });
    }
    if prepared.chains.is_empty() && prepared.degraded.is_none() {
        prepared = degrade(prepared, "no_block_size", "no engine has said how long its blocks are".into());
    }
    Ok(prepared)
}

fn degrade(prepared: Prepared, degraded: &'static str, detail: String) -> Prepared {
    Prepared { degraded: Some(degraded), detail, ..prepared }
}

/// Block sizes and look-aheads of the engines that serve a base model.
fn sizes(pool: &Pool, model: &str) -> BTreeSet<(u32, u32)> {
    let serving = pool.engines.iter().filter(|engine| engine.base_model() == Some(model));
    let known = serving.filter_map(|engine| engine.known.as_ref());
    known.map(|known| (known.block_size, known.ahead)).filter(|(size, _)| *size > 0).collect()
}
