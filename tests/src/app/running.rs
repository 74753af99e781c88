//! Everything that runs at once, from the first engine to the last process stopped.

use crate::config::Places;
use crate::decision::Decision;
use crate::edge::client::{Client, Kind};
use crate::edge::hashes::Hasher;
use crate::edge::ports::Ports;
use crate::edge::process::Process;
use crate::edge::{http, install, parts};
use crate::plan::{MODEL, Plan, local};
use anyhow::{Context, Result, bail};
use proto::block::Fingerprint;
use serde::Deserialize;
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Names of the two engines in the fleet.
const ENGINES: [&str; 2] = ["a", "b"];
/// Longest wait for the index to be in step, the picker to know the model, or a request to be reported.
const SETTLE: Duration = Duration::from_secs(60);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// One engine in `GET /v1/engines`, as far as it is read here.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct View {
    /// `name.rank`.
    pub engine: String,
    /// How far the index trusts its data.
    pub state: String,
    /// Process life.
    pub epoch: Option<String>,
    /// Blocks reachable on GPU.
    pub gpu_blocks: u64,
    /// Cached blocks whose tokens the agent does not know; absent before the first heartbeat, as what follows.
    pub unnamed: Option<u64>,
    /// Requests running.
    pub running: Option<u64>,
    /// Requests waiting.
    pub waiting: Option<u64>,
}

/// The running parts. When dropped all are asked to stop at once, then waited for.
#[derive(Debug)]
pub struct Running {
    /// Where everything is on disk.
    pub places: Places,
    /// Where everything listens.
    pub plan: Plan,
    /// The OpenAI client, through Envoy.
    pub client: Arc<Client>,
    /// vLLM's own hashing.
    pub hasher: Hasher,
    envoy: Process,
    picker: Process,
    index: Process,
    engines: Vec<Process>,
}

impl Running {
    /// Sets up what is missing and starts everything. `fixed_ports`: the ports of the README, where they are free.
    ///
    /// # Errors
    /// The first part that fails, with the end of its log.
    pub async fn start(places: Places, fixed_ports: bool) -> Result<Running> {
        install::everything(&places).await?;
        let mut ports = Ports::new(fixed_ports);
        let plan = Plan::new(&ENGINES, |wish| ports.take(wish))?;
        drop(ports);

        eprintln!("[ .. ] two vLLM engines, which takes a minute or more; logs in {}", places.logs().display());
        let mut engines: Vec<Process> =
            plan.engines.iter().map(|e| parts::engine(&places, e)).collect::<Result<_>>()?;
        let hasher = Hasher::start(&places, parts::BLOCK_SIZE)?;
        let index = parts::index(&places, &plan).await?;
        eprintln!("[ ok ] index: {} (gRPC {})", local(plan.index_http), local(plan.index_grpc));
        let picker = parts::picker(&places, &plan).await?;
        eprintln!("[ ok ] picker: {} (ext_proc {})", local(plan.picker_http), local(plan.ext_proc));
        let envoy = parts::envoy(&places, &plan).await?;
        eprintln!("[ ok ] Envoy: {} (admin {})", local(plan.front), local(plan.envoy_admin));
        let client = Arc::new(Client::start(&places, &format!("http://{}", local(plan.front)))?);
        for (process, ports) in engines.iter_mut().zip(&plan.engines) {
            parts::engine_ready(process, ports).await?;
        }
        let running = Running { places, plan, client, hasher, envoy, picker, index, engines };
        running.in_step().await?;
        running.picker_knows_the_model().await?;
        Ok(running)
    }

    /// What the index says of every engine.
    ///
    /// # Errors
    /// When it does not answer, or not that.
    pub async fn views(&self) -> Result<Vec<View>> {
        let answer = http::get(local(self.plan.index_http), "/v1/engines").await?;
        serde_json::from_value(answer["engines"].clone()).with_context(|| format!("not a list of engines: {answer}"))
    }

    /// The index's view of one engine.
    ///
    /// # Errors
    /// When it does not answer or does not know it.
    pub async fn view(&self, engine: usize) -> Result<View> {
        let id = self.plan.engines[engine].id();
        let mut views = self.views().await?;
        views.retain(|v| v.engine == id);
        views.pop().with_context(|| format!("the index does not know {id}"))
    }

    /// All fingerprints that the index holds for one engine on GPU.
    ///
    /// # Errors
    /// When it does not answer, or not that.
    pub async fn published(&self, engine: usize) -> Result<BTreeSet<Fingerprint>> {
        let path = format!("/v1/engines/{}/blocks", self.plan.engines[engine].id());
        let answer = http::get(local(self.plan.index_http), &path).await?;
        let blocks: Vec<String> = serde_json::from_value(answer["blocks"].clone()).context(path)?;
        blocks.iter().map(|fp| fp.parse().with_context(|| format!("{fp:?} is no fingerprint"))).collect()
    }

    /// Waits until the index is in step with every engine; how long that took.
    ///
    /// # Errors
    /// When it is not within [`SETTLE`].
    pub async fn in_step(&self) -> Result<Duration> {
        self.settled("the index to be in step with every engine", |v| v.state == "in_step").await
    }

    /// Waits until every engine is in step and has nothing to do.
    ///
    /// # Errors
    /// When that is not so within [`SETTLE`].
    pub async fn at_rest(&self) -> Result<Duration> {
        let rests = |v: &View| v.state == "in_step" && v.running == Some(0) && v.waiting == Some(0);
        self.settled("every engine to be at rest and in step", rests).await
    }

    async fn settled(&self, what: &str, holds: impl Fn(&View) -> bool) -> Result<Duration> {
        let begun = Instant::now();
        let mut last = String::from("it did not answer");
        while begun.elapsed() < SETTLE {
            if let Ok(views) = self.views().await {
                if views.len() == self.plan.engines.len() && views.iter().all(&holds) {
                    return Ok(begun.elapsed());
                }
                last = format!("{views:?}");
            }
            tokio::time::sleep(LOOK).await;
        }
        self.alive()?;
        bail!("waited {} s for {what}; the index says: {last}", SETTLE.as_secs())
    }

    /// Waits until the picker renders and tokenizes for itself: it has to fetch the engine's tokenizer once.
    async fn picker_knows_the_model(&self) -> Result<()> {
        let begun = Instant::now();
        let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "Are you there?"}]});
        loop {
            let answer = http::post(local(self.plan.picker_http), "/v1/explain", &body).await;
            let knows = answer.as_ref().is_ok_and(|a| a["prompt_exact"] == json!(true) && a["degraded"] == json!([]));
            if knows {
                return Ok(());
            }
            if begun.elapsed() > SETTLE {
                self.alive()?;
                bail!("waited {} s for the picker to know the model; it says: {answer:?}", SETTLE.as_secs());
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// What the picker decided for one request, once the engine has reported its end, or as it is after `limit`.
    ///
    /// # Errors
    /// When the picker does not know the request.
    pub async fn decision(&self, id: &str, limit: Duration) -> Result<Decision> {
        let begun = Instant::now();
        loop {
            let answer = http::get(local(self.plan.picker_http), &format!("/v1/decisions/{id}")).await?;
            let text = answer.to_string();
            let decision: Decision =
                serde_json::from_value(answer).with_context(|| format!("not a decision: {text}"))?;
            if decision.finished.is_some() || begun.elapsed() > limit {
                return Ok(decision);
            }
            tokio::time::sleep(LOOK / 4).await;
        }
    }

    /// Kills the index.
    pub fn kill_index(&mut self) {
        self.index.kill();
    }

    /// Starts the index again; how long it took until it was in step with every engine.
    ///
    /// # Errors
    /// When it does not start or is not in step within [`SETTLE`].
    pub async fn restart_index(&mut self) -> Result<Duration> {
        let begun = Instant::now();
        self.index = parts::index(&self.places, &self.plan).await?;
        self.in_step().await?;
        Ok(begun.elapsed())
    }

    /// Kills an engine with all its processes.
    pub fn kill_engine(&mut self, engine: usize) {
        self.engines[engine].kill();
    }

    /// Starts a killed engine again under its name. Not yet ready.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn restart_engine(&mut self, engine: usize) -> Result<()> {
        self.engines[engine] = parts::engine(&self.places, &self.plan.engines[engine])?;
        Ok(())
    }

    /// Waits until an engine answers.
    ///
    /// # Errors
    /// When it ends or takes too long.
    pub async fn engine_ready(&mut self, engine: usize) -> Result<()> {
        parts::engine_ready(&mut self.engines[engine], &self.plan.engines[engine]).await
    }

    /// An error when a part has ended by itself.
    ///
    /// # Errors
    /// Names it, with the end of its log.
    pub fn alive(&self) -> Result<()> {
        self.engines.iter().chain([&self.index, &self.picker, &self.envoy]).try_for_each(Process::alive)
    }

    /// Sends one request of the demo's model and gives what the client saw.
    ///
    /// # Errors
    /// When the client itself has ended.
    pub async fn send(&self, kind: Kind, body: &serde_json::Value) -> Result<crate::edge::client::Seen> {
        self.client.send(kind, body).await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Together first, so that their ends overlap; each is waited for when its field is dropped.
        for process in self.engines.iter().chain([&self.envoy, &self.picker, &self.index]) {
            process.ask_to_stop();
        }
    }
}
