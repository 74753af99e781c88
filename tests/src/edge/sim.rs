//! A simulated engine as clients and routers see it: vLLM's HTTP, and a real agent that publishes.
//!
//! It is quick and exact, and it keeps what it was sent, so that tests can compare. A request with the header
//! `x-sim-step: <name>` is answered one event at a time, each after a `POST /sim/step?name=<name>`: whether an event
//! came through before the next one was made is then a fact, not a matter of time.

use crate::sim::{NotStarted, SimEngine};
use crate::talk::words;
use agent::{Agent, Config, Facts};
use anyhow::{Context, Result};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use picker::bundle::Bundle;
use picker::prompt::{Now, Renderer};
use picker::request::{Kind, Limits, Request};
use serde_json::{Value, json};
use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;

/// Requests kept for comparison, the newest: a test looks at one or two, and each may have 2 MiB.
const KEPT: usize = 64;
/// Longest body taken, in bytes: four times what the picker takes, so that it is never the engine that refuses.
const MAX_BODY: usize = 64 << 20;
/// Events on their way to one client.
const IN_FLIGHT: usize = 4;

/// What to simulate.
#[derive(Debug, Clone)]
pub struct Options {
    /// Name in the fleet.
    pub name: String,
    /// Where HTTP listens.
    pub http: SocketAddr,
    /// Where the agent publishes, as `KVATLAS_BIND`.
    pub bind: String,
    /// Where the agent answers, as `KVATLAS_CONTROL`.
    pub control: String,
    /// The served name.
    pub model: String,
    /// Adapters that requests may name as their model.
    pub adapters: Vec<String>,
    /// Token ids in a block.
    pub block_size: u32,
    /// Blocks in the pool.
    pub blocks: u32,
    /// The deployment's seed.
    pub seed: u64,
    /// The texts of `tokenizer.json` and `tokenizer_config.json`.
    pub tokenizer: (String, String),
}

/// A request as it arrived.
#[derive(Debug, Clone)]
pub struct Received {
    /// Path with query.
    pub path: String,
    /// Headers.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
}

/// A running simulated engine. Dropping it ends the server and the agent.
pub struct Sim {
    /// Where HTTP listens.
    pub http: SocketAddr,
    shared: Arc<Shared>,
    agent: agent::app::Publisher,
    server: tokio::task::JoinHandle<()>,
}

struct Shared {
    options: Options,
    engine: Mutex<SimEngine>,
    freed: Notify,
    renderer: Renderer,
    received: Mutex<VecDeque<Received>>,
    steps: Mutex<HashMap<String, Arc<Semaphore>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sim {
    /// Starts agent and server inside the current runtime.
    ///
    /// # Errors
    /// When an address is taken or the tokenizer cannot be loaded.
    pub async fn start(options: Options) -> Result<Sim> {
        let mut facts = Facts::plain(&options.model, options.block_size, options.blocks);
        facts.engine_version = "simulated".to_owned();
        facts.max_num_seqs = 16;
        facts.max_adapters = options.adapters.len() as u32;
        let config = Config {
            bind: options.bind.clone(),
            control: options.control.clone(),
            engine: options.name.clone(),
            seed: options.seed,
            ..Config::default()
        };
        let (tokenizer, settings) = &options.tokenizer;
        let longest = u64::from(options.block_size) * u64::from(options.blocks);
        let bundle = Bundle::from_texts(tokenizer, settings, None, vec![options.model.clone()], longest)?;
        let renderer = Renderer::load(&bundle).context("the simulated engine's tokenizer")?;
        let Agent { engine, publisher } = Agent::start(&config, &facts)?;
        publisher.set_bundle(bundle.to_bytes()?);
        let listener = TcpListener::bind(options.http).await.with_context(|| format!("{} is taken", options.http))?;
        let http = listener.local_addr()?;
        let shared = Arc::new(Shared {
            options,
            engine: Mutex::new(SimEngine::new(engine, &facts)),
            freed: Notify::new(),
            renderer,
            received: Mutex::default(),
            steps: Mutex::default(),
        });
        let pool = Arc::downgrade(&shared);
        publisher.set_auditor(Box::new(move |from| {
            let mut blocks = lock(&pool.upgrade()?.engine).audit();
            blocks.retain(|(block, _)| *block >= from);
            Some((blocks, None))
        }));
        let router = Router::new()
            .route("/health", get(async || StatusCode::OK))
            .route("/v1/models", get(models))
            .route("/v1/completions", post(generate))
            .route("/v1/chat/completions", post(generate))
            .route("/reset_prefix_cache", post(reset))
            .route("/sim/step", post(step))
            .layer(DefaultBodyLimit::max(MAX_BODY))
            .with_state(Arc::clone(&shared));
        let server = tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                eprintln!("a simulated engine ended: {error}");
            }
        });
        Ok(Sim { http, shared, agent: publisher, server })
    }

    /// Where the agent publishes and answers.
    pub fn agent(&self) -> (&str, &str) {
        (self.agent.events(), self.agent.control())
    }

    /// The newest requests, oldest first.
    pub fn received(&self) -> Vec<Received> {
        lock(&self.shared.received).iter().cloned().collect()
    }

    /// Lets one more event of the stream `name` go.
    pub fn step(&self, name: &str) {
        self.shared.step(name).add_permits(1);
    }

    /// Requests that run and that wait.
    pub fn busy(&self) -> (usize, u32) {
        let engine = lock(&self.shared.engine);
        (engine.running(), engine.waiting())
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Shared {
    fn step(&self, name: &str) -> Arc<Semaphore> {
        let mut steps = lock(&self.steps);
        Arc::clone(steps.entry(name.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(0))))
    }

    fn remember(&self, received: Received) {
        let mut kept = lock(&self.received);
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(received);
    }

    /// Token ids of a text as it stands.
    fn encode(&self, text: &str) -> Vec<u32> {
        let body = json!({"prompt": text, "add_special_tokens": false}).to_string();
        let request = Request::parse(Kind::Completions, body.as_bytes(), Limits::default());
        request.ok().and_then(|r| self.renderer.tokens(&r, Now::default()).ok()).map(|p| p.tokens).unwrap_or_default()
    }
}

async fn models(State(shared): State<Arc<Shared>>, uri: Uri, headers: HeaderMap) -> Response {
    shared.remember(Received { path: uri.to_string(), headers, body: Bytes::new() });
    let names = std::iter::once(&shared.options.model).chain(&shared.options.adapters);
    let list: Vec<Value> = names.map(|name| json!({"id": name, "object": "model"})).collect();
    answer(&shared, json!({"object": "list", "data": list}))
}

async fn reset(State(shared): State<Arc<Shared>>) -> StatusCode {
    if lock(&shared.engine).reset() { StatusCode::OK } else { StatusCode::CONFLICT }
}

async fn step(State(shared): State<Arc<Shared>>, Query(query): Query<HashMap<String, String>>) -> StatusCode {
    let Some(name) = query.get("name") else { return StatusCode::BAD_REQUEST };
    shared.step(name).add_permits(1);
    StatusCode::OK
}

fn answer(shared: &Shared, body: Value) -> Response {
    let name = shared.options.name.clone();
    ([(header::CONTENT_TYPE, "application/json".to_owned()), (ENGINE, name)], body.to_string()).into_response()
}

fn refuse(shared: &Shared, status: StatusCode, message: &str) -> Response {
    let mut response = answer(shared, json!({"error": {"message": message, "code": status.as_u16()}}));
    *response.status_mut() = status;
    response
}

/// Says which engine answered.
const ENGINE: header::HeaderName = header::HeaderName::from_static("x-sim-engine");

/// One request in the engine. Whatever becomes of it, the engine hears of its end.
struct Served {
    shared: Arc<Shared>,
    id: String,
    started: bool,
    over: &'static str,
}

impl Drop for Served {
    fn drop(&mut self) {
        let mut engine = lock(&self.shared.engine);
        if self.started {
            engine.finish(&self.id, self.over)
        } else {
            engine.give_up(&self.id)
        }
        drop(engine);
        self.shared.freed.notify_waiters();
    }
}

/// What an answer is made of.
struct Plan {
    kind: Kind,
    model: String,
    prompt: Vec<u32>,
    cached: usize,
    words: Vec<String>,
    tokens: Vec<u32>,
}

async fn generate(State(shared): State<Arc<Shared>>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    shared.remember(Received { path: uri.to_string(), headers: headers.clone(), body: body.clone() });
    let kind = Kind::of_path(uri.path());
    let limits = Limits { body_bytes: MAX_BODY, ..Limits::default() };
    let request = match Request::parse(kind, &body, limits) {
        Ok(request) => request,
        Err(error) => return refuse(&shared, StatusCode::BAD_REQUEST, &error.to_string()),
    };
    let model = request.model.clone().unwrap_or_default().into_owned();
    let adapter = if model == shared.options.model { "" } else { model.as_str() };
    if !adapter.is_empty() && !shared.options.adapters.contains(&model) {
        return refuse(&shared, StatusCode::NOT_FOUND, &format!("the model {model:?} does not exist"));
    }
    let prompt = match shared.renderer.tokens(&request, Now::default()) {
        Ok(prompt) if prompt.exact() && !prompt.tokens.is_empty() => prompt.tokens,
        Ok(_) => return refuse(&shared, StatusCode::BAD_REQUEST, "the prompt is empty, or no text"),
        Err(error) => return refuse(&shared, StatusCode::BAD_REQUEST, &error.to_string()),
    };
    let max_tokens = request.max_tokens.unwrap_or(16).clamp(1, 1024) as usize;
    let text = words(prompt.iter().fold(0, |sum, t| sum * 31 % 1_000_003 + u64::from(*t)), max_tokens.div_ceil(4));
    let mut tokens = shared.encode(&text);
    tokens.truncate(max_tokens);
    let given = headers.get("x-request-id").and_then(|id| id.to_str().ok()).unwrap_or("none");
    let id = if kind == Kind::Chat { format!("chatcmpl-{given}") } else { format!("cmpl-{given}-0") };

    lock(&shared.engine).arrive(&id, &prompt, adapter, &request.cache_salt);
    let mut served = Served { shared: Arc::clone(&shared), id: id.clone(), started: false, over: "abort" };
    let cached = loop {
        let freed = shared.freed.notified();
        let tried = lock(&shared.engine).start(&id, &prompt, adapter, &request.cache_salt, tokens.len());
        match tried {
            Ok(cached) => break cached,
            Err(NotStarted::Later) => freed.await,
            Err(error) => return refuse(&shared, StatusCode::BAD_REQUEST, &error.to_string()),
        }
    };
    served.started = true;
    let words = text.split_inclusive(' ').map(str::to_owned).collect();
    let plan = Plan { kind, model, prompt, cached, words, tokens };
    let steps = headers.get("x-sim-step").and_then(|name| name.to_str().ok()).map(|name| shared.step(name));
    if !request.stream {
        for token in &plan.tokens {
            lock(&shared.engine).sampled(&id, *token);
        }
        served.over = "stop";
        return answer(&shared, plan.whole(&id));
    }
    let (sender, events) = mpsc::channel::<Result<String, Infallible>>(IN_FLIGHT);
    tokio::spawn(async move {
        // A client that goes away ends this: the request is dropped, and the engine told so.
        tokio::select! {
            () = sender.closed() => {}
            () = stream(&mut served, &plan, &sender, steps) => {}
        }
    });
    let kind = [(header::CONTENT_TYPE, "text/event-stream".to_owned()), (ENGINE, shared.options.name.clone())];
    (kind, Body::from_stream(ReceiverStream::new(events))).into_response()
}

/// Sends the answer word by word, unless the client goes away before the end.
async fn stream(
    served: &mut Served,
    plan: &Plan,
    sender: &mpsc::Sender<Result<String, Infallible>>,
    steps: Option<Arc<Semaphore>>,
) {
    let mut sampled = 0;
    for (at, word) in plan.words.iter().enumerate() {
        if let Some(steps) = &steps {
            let Ok(permit) = steps.acquire().await else { return };
            permit.forget();
        }
        let until = plan.tokens.len() * (at + 1) / plan.words.len();
        for token in &plan.tokens[sampled..until] {
            lock(&served.shared.engine).sampled(&served.id, *token);
        }
        sampled = until;
        let last = at + 1 == plan.words.len();
        if sender.send(Ok(format!("data: {}\n\n", plan.piece(&served.id, word, last)))).await.is_err() {
            return;
        }
    }
    if sender.send(Ok("data: [DONE]\n\n".to_owned())).await.is_ok() {
        served.over = "stop";
    }
}

impl Plan {
    fn usage(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt.len(),
            "completion_tokens": self.tokens.len(),
            "total_tokens": self.prompt.len() + self.tokens.len(),
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }

    fn whole(&self, id: &str) -> Value {
        let text = self.words.concat();
        let (object, choice) = match self.kind {
            Kind::Chat => ("chat.completion", json!({"message": {"role": "assistant", "content": text}})),
            _ => ("text_completion", json!({"text": text})),
        };
        let mut choice = choice;
        choice["index"] = 0.into();
        choice["finish_reason"] = "stop".into();
        json!({"id": id, "object": object, "created": 0, "model": self.model, "choices": [choice], "usage": self.usage()})
    }

    fn piece(&self, id: &str, word: &str, last: bool) -> Value {
        let (object, mut choice) = match self.kind {
            Kind::Chat => ("chat.completion.chunk", json!({"delta": {"role": "assistant", "content": word}})),
            _ => ("text_completion", json!({"text": word})),
        };
        choice["index"] = 0.into();
        choice["finish_reason"] = if last { "stop".into() } else { Value::Null };
        let usage = if last { self.usage() } else { Value::Null };
        json!({"id": id, "object": object, "created": 0, "model": self.model, "choices": [choice], "usage": usage})
    }
}
