//! Bundles: fetched when an engine's digest is new, loaded off the async threads, warmed, swapped in.

use super::router::Router;
use crate::bundle::{Bundle, digest};
use crate::pool::Pool;
use crate::prompt::Renderer;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Between two tries to get a bundle that was not there.
const AGAIN: Duration = Duration::from_millis(500);
/// Models whose bundles are kept. Each takes 80 to 300 MB.
const MAX_MODELS: usize = 64;

/// Which bundle each model of the pool wants: digests by base model.
#[derive(Clone)]
pub struct Wanted {
    sender: Arc<watch::Sender<BTreeMap<String, String>>>,
}

impl Wanted {
    /// Nothing is wanted.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Wanted {
        Wanted { sender: Arc::new(watch::Sender::new(BTreeMap::new())) }
    }

    /// Looks at a pool. Of several digests of one model (a rolling update) the most common counts, then the least.
    pub fn see(&self, pool: &Pool) {
        let mut votes: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
        for engine in &pool.engines {
            let Some(known) = engine.known.as_ref().filter(|known| !known.bundle.is_empty()) else { continue };
            let Some(model) = engine.base_model() else { continue };
            *votes.entry(model).or_default().entry(known.bundle.as_str()).or_default() += 1;
        }
        let wanted: BTreeMap<String, String> = votes
            .into_iter()
            .take(MAX_MODELS)
            .filter_map(|(model, digests)| {
                let most = digests.iter().max_by_key(|(digest, count)| (**count, std::cmp::Reverse(**digest)))?;
                Some((model.to_owned(), (*most.0).to_owned()))
            })
            .collect();
        self.sender.send_if_modified(|now| {
            let changed = *now != wanted;
            *now = wanted;
            changed
        });
    }
}

/// A bundle of the configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the bundle of {model:?} cannot be used: {why}")]
pub struct BadLocal {
    model: String,
    why: String,
}

/// Loads bundles of the configuration, by model. Those stay, whatever engines tell. Gives the models.
///
/// # Errors
/// When one cannot be used.
pub async fn load_local(router: &Arc<Router>, bundles: Vec<(String, Vec<u8>)>) -> Result<Vec<String>, BadLocal> {
    let mut names = Vec::with_capacity(bundles.len());
    for (model, bytes) in bundles {
        match load(bytes).await {
            Ok(renderer) => install(router, &model, renderer).await,
            Err(why) => return Err(BadLocal { model, why }),
        }
        names.push(model);
    }
    Ok(names)
}

async fn load(bytes: Vec<u8>) -> Result<Arc<Renderer>, String> {
    let loaded = tokio::task::spawn_blocking(move || {
        let bundle = Bundle::from_bytes(&bytes).map_err(|error| error.to_string())?;
        Renderer::load(&bundle).map_err(|error| error.to_string())
    });
    match loaded.await {
        Ok(renderer) => renderer.map(Arc::new),
        Err(_) => Err("loading it panicked".into()),
    }
}

async fn install(router: &Arc<Router>, model: &str, renderer: Arc<Renderer>) {
    if let Some(fault) = renderer.chat_fault() {
        tracing::warn!(model, %fault, "chats of this model are not exact");
    }
    router.render.warm(Arc::clone(&renderer)).await;
    router.renderers.rcu(|now| {
        let mut next = HashMap::clone(now);
        next.insert(model.to_owned(), Arc::clone(&renderer));
        next
    });
    tracing::info!(model, "tokenizer and template are loaded");
}

/// Gets what is wanted, for ever. `local`: models that are not asked for.
pub async fn follow(router: Arc<Router>, wanted: Wanted, local: Vec<String>) {
    let mut changes = wanted.sender.subscribe();
    // Digests that were tried, with success or without: a bundle that cannot be used is not loaded again and again.
    let mut done: HashMap<String, String> = HashMap::new();
    loop {
        let now = changes.borrow_and_update().clone();
        let mut missing = false;
        for (model, digest) in now.iter().filter(|(model, _)| !local.contains(model)) {
            if done.get(model) == Some(digest) {
                continue;
            }
            match get(&router, model, digest).await {
                Ok(renderer) => install(&router, model, renderer).await,
                Err(NotGot::Later(why)) => {
                    tracing::debug!(model, digest, why, "the bundle is not here yet");
                    missing = true;
                    continue;
                }
                Err(NotGot::Never(why)) => {
                    tracing::error!(model, digest, why, "the bundle cannot be used: the model is routed by load");
                }
            }
            done.insert(model.clone(), digest.clone());
        }
        let gone: Vec<String> = done.keys().filter(|model| !now.contains_key(*model)).cloned().collect();
        // A model that nobody serves any more keeps its tokenizer until room is needed: engines restart.
        if done.len() > MAX_MODELS {
            for model in gone {
                done.remove(&model);
                router.renderers.rcu(|now| {
                    let mut next = HashMap::clone(now);
                    next.remove(&model);
                    next
                });
            }
        }
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(AGAIN), if missing => {}
        }
    }
}

enum NotGot {
    Later(String),
    Never(String),
}

async fn get(router: &Router, model: &str, wanted: &str) -> Result<Arc<Renderer>, NotGot> {
    let (told, bytes) = router.index.bundle(model).await.map_err(NotGot::Later)?;
    let own = digest(&bytes);
    if told != wanted || own != wanted {
        // The index may still have the one before.
        return Err(NotGot::Later(format!("got {} bytes told to be {told}, which are {own}", bytes.len())));
    }
    load(bytes).await.map_err(NotGot::Never)
}
