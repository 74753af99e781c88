//! One decision from a request's body to a verdict, within its deadline, whatever is missing.

use super::clock::{Clock, request_id};
use super::lookup::{Index, NoAnswer, Placement, Question};
use super::metrics::Metrics;
use super::render::{NotDone, RenderPool};
use crate::candidates::{Found, candidates, serves};
use crate::config::Config;
use crate::decisions::{Decision, Decisions, Stages};
use crate::exchange::{Ask, Verdict};
use crate::ledger::{Id, Ledger};
use crate::pick::pick;
use crate::pool::Pool;
use crate::prepare::{Means, Prepared, REFUSED, Renderers, generates, prepare};
use crate::prompt::Now;
use crate::record;
use crate::refusal::Refusal;
use crate::request::{BadBody, Kind, Limits};
use crate::score::Asked;
use arc_swap::ArcSwap;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of body that make a token, for the deadline of what is not yet tokenized.
const BYTES_A_TOKEN: usize = 4;
/// Deepest nesting of a body.
const BODY_DEPTH: usize = 128;

/// Everything that decisions share.
pub struct Router {
    /// What was configured.
    pub config: Config,
    /// The engines.
    pub pool: ArcSwap<Pool>,
    /// Loaded tokenizers.
    pub renderers: ArcSwap<Renderers>,
    /// Threads that tokenize.
    pub render: RenderPool,
    /// The index.
    pub index: Index,
    /// Counters.
    pub metrics: Metrics,
    /// Time.
    pub clock: Clock,
    /// Bytes of request bodies held by all streams.
    pub buffered: AtomicUsize,
    adapters: Arc<Vec<(String, String)>>,
    ledger: Mutex<Ledger>,
    decisions: Mutex<Decisions>,
}

/// A verdict, and the placement that it made. Dropping the placement takes it back: [`Placed::keep`] it once the
/// answer has been handed over whole.
pub struct Decided {
    /// For the exchange.
    pub verdict: Verdict,
    /// `None` when nobody was picked.
    pub placed: Option<Placed>,
}

/// A placement that is not yet final.
pub struct Placed {
    router: Arc<Router>,
    id: Id,
    kept: bool,
}

impl Placed {
    /// The engine will see the request.
    pub fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        if !self.kept {
            self.router.take_back(&[self.id]);
        }
    }
}

/// What was gathered before the pick.
struct Gathered {
    prepared: Prepared,
    found: HashMap<String, Found>,
    degraded: Vec<&'static str>,
    stages: Stages,
}

/// Where it goes.
struct Made {
    /// The rank to ask for.
    rank: Option<u32>,
    /// Whether it is counted as coming.
    placed: bool,
    /// Placements that had to be forgotten for want of room.
    forgotten: Vec<Id>,
}

impl Router {
    /// A router that knows nothing yet.
    pub fn new(config: Config, index: Index, render: RenderPool, metrics: Metrics) -> Router {
        let adapters = config.models.iter().flat_map(|m| m.adapters.iter().map(|a| (a.clone(), m.name.clone())));
        Router {
            adapters: Arc::new(adapters.collect()),
            config,
            pool: ArcSwap::default(),
            renderers: ArcSwap::default(),
            render,
            index,
            metrics,
            clock: Clock::start(),
            buffered: AtomicUsize::new(0),
            ledger: Mutex::default(),
            decisions: Mutex::default(),
        }
    }

    /// The ledger. Hold it briefly: every decision needs it.
    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The decisions. Hold them briefly.
    pub fn decisions(&self) -> MutexGuard<'_, Decisions> {
        self.decisions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes placements back that will not come, here and at the index.
    pub fn take_back(&self, ids: &[Id]) {
        for id in ids {
            // The guard is gone before the index is told.
            let ended = self.ledger().end(*id);
            if ended {
                self.index.release(uuid::Uuid::from_u128(*id).to_string());
            }
        }
    }

    /// Decides, places, notes.
    pub async fn decide(self: &Arc<Self>, ask: Ask) -> Decided {
        let began = Instant::now();
        let gathered = match self.gather(&ask, began).await {
            Ok(gathered) => gathered,
            Err(bad) => return self.refuse(bad_body(&bad, self.config.body_limit)),
        };
        let (id, text) = request_id();
        let (decision, made) = self.settle(&ask, gathered, began, id, text, true);
        match (&decision.address, made) {
            (Some(address), Some(Made { rank, placed, forgotten })) => {
                let verdict =
                    Verdict::Go { destination: address.clone(), rank, request_id: decision.request_id.clone() };
                self.note(Some(id), decision);
                self.take_back(&forgotten);
                let placed = placed.then(|| Placed { router: Arc::clone(self), id, kept: false });
                Decided { verdict, placed }
            }
            _ => {
                let message = format!(
                    "no engine may take this request: {} in the pool, {} excluded",
                    decision.candidate_count + decision.excluded_count,
                    decision.excluded_count
                );
                self.note(None, decision);
                self.refuse(Refusal::no_endpoint(message))
            }
        }
    }

    /// What would be decided, and nothing done.
    ///
    /// # Errors
    /// When the body cannot be read.
    pub async fn explain(&self, ask: Ask) -> Result<Decision, Refusal> {
        let began = Instant::now();
        let gathered = self.gather(&ask, began).await.map_err(|bad| bad_body(&bad, self.config.body_limit))?;
        let (id, text) = request_id();
        Ok(self.settle(&ask, gathered, began, id, text, false).0)
    }

    fn refuse(&self, refusal: Refusal) -> Decided {
        self.metrics.refused(refusal.code);
        tracing::info!(reason = refusal.code, message = refusal.message, "refused");
        Decided { verdict: Verdict::Refuse(refusal), placed: None }
    }

    fn note(&self, id: Option<Id>, decision: Decision) {
        let lost = self.decisions().push(id, decision);
        if let Some(lost) = lost {
            self.metrics.joined(&lost);
        }
    }

    async fn gather(&self, ask: &Ask, began: Instant) -> Result<Gathered, BadBody> {
        let mut gathered = Gathered {
            prepared: Prepared::default(),
            found: HashMap::new(),
            degraded: Vec::new(),
            stages: Stages::default(),
        };
        let kind = Kind::of_path(&ask.path);
        let Some(body) = ask.body.clone().filter(|_| kind != Kind::Other) else {
            gathered.degraded.push("no_prompt");
            return Ok(gathered);
        };
        let means = Means {
            pool: self.pool.load_full(),
            renderers: self.renderers.load_full(),
            adapters: Arc::clone(&self.adapters),
            seed: self.config.seed,
            now: Now {
                unix_s: (self.clock.wall_ms() / 1000) as i64,
                offset_s: self.config.utc_offset_minutes.saturating_mul(60),
            },
            limits: Limits { body_bytes: self.config.body_limit, depth: BODY_DEPTH },
        };
        let length = body.len();
        let job = self.render.run(length, move || {
            let waited = began.elapsed();
            let prepared = prepare(kind, &body, &means);
            (prepared, waited, began.elapsed())
        });
        let limit = began + self.config.deadline.of(length / BYTES_A_TOKEN);
        match tokio::time::timeout_at(limit.into(), job).await {
            Ok(Ok((prepared, waited, done))) => {
                gathered.prepared = prepared?;
                gathered.stages.wait_us = micros(waited);
                gathered.stages.prepare_us = micros(done - waited);
            }
            Ok(Err(NotDone::Busy)) => gathered.degraded.push("tokenizer_busy"),
            Ok(Err(NotDone::Fault)) => gathered.degraded.push("tokenizer_fault"),
            Err(_) => gathered.degraded.push("tokenizer_slow"),
        }
        gathered.degraded.extend(gathered.prepared.degraded);
        self.look_up(&mut gathered, began).await;
        Ok(gathered)
    }

    async fn look_up(&self, gathered: &mut Gathered, began: Instant) {
        let asked = Instant::now();
        let limit = began + self.config.deadline.of(gathered.prepared.prompt_tokens as usize);
        for chain in &gathered.prepared.chains {
            let question = Question {
                root: chain.root,
                block_size: chain.block_size,
                ahead: chain.ahead,
                prompt_tokens: gathered.prepared.prompt_tokens,
                fingerprints: chain.fingerprints.clone(),
            };
            // The index keeps to the deadline itself; this is for what keeps no time at all.
            let answer = tokio::time::timeout_at(limit.into(), self.index.find(question, limit)).await;
            match answer.unwrap_or(Err(NoAnswer::Slow)) {
                // With several block sizes each engine is answered several times; its own size is the one that counts.
                Ok(found) => {
                    let pool = self.pool.load();
                    let of_size = |id: &str| {
                        let engine = pool.engines.iter().find(|engine| &*engine.id == id);
                        engine
                            .and_then(|e| e.known.as_ref())
                            .is_none_or(|k| (k.block_size, k.ahead) == (chain.block_size, chain.ahead))
                    };
                    let several = gathered.prepared.chains.len() > 1;
                    gathered.found.extend(found.into_iter().filter(|(id, _)| !several || of_size(id)));
                }
                Err(why) => {
                    gathered.degraded.push(why.label());
                    break;
                }
            }
        }
        gathered.stages.lookup_us = micros(asked.elapsed());
    }

    /// Scores and picks; with `act` also counts the placement and tells the index, in one breath, so that the next
    /// decision sees it.
    fn settle(
        &self,
        ask: &Ask,
        gathered: Gathered,
        began: Instant,
        id: Id,
        request_id: String,
        act: bool,
    ) -> (Decision, Option<Made>) {
        let scoring = Instant::now();
        let Gathered { prepared, found, degraded, mut stages } = gathered;
        let pool = self.pool.load_full();
        let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
        let asked = Asked {
            model: prepared.model.clone(),
            adapter: prepared.adapter.clone(),
            prompt_tokens: prepared.prompt_tokens as usize,
            headers: ask.headers.iter().map(|h| (h.name.clone(), text(&h.value))).collect(),
            time_ms: self.clock.wall_ms(),
        };
        let asked_index = !found.is_empty();
        let now_ms = self.clock.now_ms();
        let mut ledger = self.ledger();
        let engines = candidates(&pool, &prepared, found, &mut ledger, now_ms, self.config.max_utilization);
        let seed = id as u64 ^ (id >> 64) as u64;
        let serving = |candidate: &_| serves(&prepared, candidate);
        let picked = pick(&self.config.policy, &asked, &engines, ask.subset.as_ref(), serving, seed);
        let chosen = picked.chosen.map(|at| &engines[at]);
        let tokens = chosen.map_or(0, |c| prepared.prompt_tokens.saturating_sub(c.cached_tokens));
        let place = act && generates(&ask.path) && prepared.degraded != Some(REFUSED);
        let forgotten = match chosen {
            Some(chosen) if place => ledger.place(id, &chosen.engine.id, tokens, now_ms),
            _ => Vec::new(),
        };
        drop(ledger);
        if let (Some(chosen), true) = (chosen, place) {
            let shape = chosen.engine.known.as_ref().map_or((0, 0), |known| (known.block_size, known.ahead));
            let chain = prepared.chains.iter().find(|chain| (chain.block_size, chain.ahead) == shape);
            let fingerprints =
                chain.map(|c| c.fingerprints.iter().copied().take(super::lookup::MAX_RESERVED).collect());
            self.index.reserve(Placement {
                engine: chosen.engine.id.to_string(),
                request_id: request_id.clone(),
                fingerprints: fingerprints.unwrap_or_default(),
                tokens,
            });
        }
        stages.score_us = micros(scoring.elapsed());
        stages.total_us = micros(began.elapsed());
        let about = record::About {
            ask,
            prepared: &prepared,
            request_id,
            at_ms: asked.time_ms,
            degraded,
            stages,
            asked_index,
            placed: place,
        };
        let decision = record::decision(about, &engines, &picked);
        if act {
            for fault in picked.ranked.iter().flat_map(|ranked| &ranked.scored.faults) {
                self.metrics.scorer_fault(fault);
            }
            for (at, _) in &picked.excluded {
                self.metrics.unhealthy(&engines[*at].engine.id, engines[*at].health);
            }
            self.metrics.decided(&decision, prepared.known_model);
            log(&decision, &prepared, self);
        }
        let made = chosen.map(|chosen| Made { rank: chosen.engine.rank, placed: place, forgotten });
        (decision, made)
    }

    /// Bytes of bodies are taken from a common budget before they are kept.
    pub fn hold(&self, bytes: usize) -> bool {
        let held = self.buffered.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if held > self.config.buffered_limit {
            self.buffered.fetch_sub(bytes, Ordering::Relaxed);
            return false;
        }
        true
    }

    /// Gives bytes back to the common budget.
    pub fn let_go(&self, bytes: usize) {
        self.buffered.fetch_sub(bytes, Ordering::Relaxed);
    }
}

fn micros(duration: Duration) -> u64 {
    duration.as_micros() as u64
}

fn bad_body(bad: &BadBody, limit: usize) -> Refusal {
    match bad {
        BadBody::TooLarge { .. } => Refusal::too_large(limit),
        _ => Refusal::bad_body(bad.to_string()),
    }
}

/// The points of a request in the log, all with its id: what was decided at INFO, why at DEBUG, with what at TRACE.
fn log(decision: &Decision, prepared: &Prepared, router: &Router) {
    let id = decision.request_id.as_str();
    let client = decision.client_id.as_deref().unwrap_or_default();
    if tracing::enabled!(tracing::Level::DEBUG) {
        tracing::debug!(
            requestID = id,
            clientRequestID = client,
            model = decision.model,
            inputTokens = decision.prompt_tokens.unwrap_or(0),
            adapter = decision.adapter,
            "received"
        );
        if !decision.degraded.is_empty() {
            tracing::debug!(requestID = id, reasons = ?decision.degraded, detail = prepared.detail, "degraded");
        }
        let top: Vec<_> = decision.candidates.iter().take(3).map(|c| (&c.engine, c.score, &c.factors)).collect();
        tracing::debug!(
            requestID = id,
            top = json(&top),
            all = json(&decision.candidates),
            excluded = json(&decision.excluded),
            stages = json(&decision.stages),
            "scored"
        );
    }
    if tracing::enabled!(tracing::Level::TRACE) {
        let weights: Vec<_> = router.config.policy.factors.weights().collect();
        for chain in &prepared.chains {
            let blocks = &chain.fingerprints;
            tracing::trace!(requestID = id, blockSize = chain.block_size, ?blocks, ?weights, "blocks");
        }
    }
    tracing::info!(
        requestID = id,
        clientRequestID = client,
        pod = decision.engine.as_deref().unwrap_or_default(),
        address = decision.address.as_deref().unwrap_or_default(),
        reason = decision.reason,
        score = decision.score,
        matchRatio = decision.match_ratio,
        "picked"
    );
}

/// Nested values of a log line, which are text there.
fn json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}
