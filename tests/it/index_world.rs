//! Engines' agents on real sockets (of the `zeromq` crate, so that both ends of the wire are not ours), and an index.

use crate::in_step_sender::{KINDS, MODEL, Sender};
use anyhow::{Context, Result, bail};
use harness::edge::http;
use harness::seeded::Seeded;
use index::app::{Handle, start};
use index::config::{Config, FleetSource};
use proto::block::{Namespace, chain, root};
use proto::control::{decode, encode};
use proto::event::{seq_frame, topic};
use proto::fleet::Entry;
use proto::id::{EngineId, Epoch};
use proto::residency::Link;
use proto::wire::kvatlas::index::v1::index_client::IndexClient;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::task::JoinHandle;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// The deployment's seed.
pub const SEED: u64 = 77;
/// Longest wait for anything: exactness is asserted, never time.
const LIMIT: Duration = Duration::from_secs(60);

/// The fingerprints of a prompt of these tokens.
pub fn prompt(tokens: std::ops::Range<u32>) -> Vec<u64> {
    let tokens: Vec<u32> = tokens.collect();
    chain(root(Namespace { model: MODEL, adapter: "", salt: "" }, SEED), 16, &tokens)
}

/// Asks again and again until something holds.
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let end = tokio::time::Instant::now() + LIMIT;
    while !holds().await? {
        if tokio::time::Instant::now() > end {
            bail!("not within {LIMIT:?}: {what}");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// One engine's agent on two sockets.
pub struct Publisher {
    pub name: String,
    pub events: String,
    pub control: String,
    sender: Arc<Mutex<Sender>>,
    publisher: Arc<tokio::sync::Mutex<PubSocket>>,
    quiet: Arc<std::sync::atomic::AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

impl Publisher {
    /// An engine with an agent of this seed, that sends heartbeats.
    pub async fn start(name: &str, seed: u64) -> Result<Publisher> {
        let sender = Arc::new(Mutex::new(Sender::new(name, seed, Epoch { start_ms: unix_ms(), random: 1 })));
        let (mut publisher, mut router) = (PubSocket::new(), RouterSocket::new());
        let events = publisher.bind("tcp://127.0.0.1:0").await?.to_string();
        let control = router.bind("tcp://127.0.0.1:0").await?.to_string();
        let publisher = Arc::new(tokio::sync::Mutex::new(publisher));
        let quiet = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let mut made = Self { name: name.into(), events, control, sender, publisher, quiet, tasks: vec![] };
        let asked = made.sender.clone();
        made.tasks.push(tokio::spawn(async move {
            let mut dice = Seeded::new(1);
            while let Ok(message) = router.recv().await {
                let frames = message.into_vec();
                let Some(request) = frames.last().and_then(|frame| decode(frame).ok()) else { continue };
                let reply = asked.lock().unwrap_or_else(PoisonError::into_inner).answer(&request, &mut dice);
                let mut answer = ZmqMessage::from(encode(&reply).expect("a reply encodes"));
                answer.push_front(frames[1].clone());
                answer.push_front(frames[0].clone());
                let _ = router.send(answer).await;
            }
        }));
        let (sender, publisher, quiet, name) =
            (made.sender.clone(), made.publisher.clone(), made.quiet.clone(), made.name.clone());
        made.tasks.push(tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(50)).await;
                if !quiet.load(std::sync::atomic::Ordering::Relaxed) {
                    say(&sender, &publisher, &name, true).await;
                }
            }
        }));
        Ok(made)
    }

    /// The engine, to change it.
    pub fn engine(&self) -> MutexGuard<'_, Sender> {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A prompt comes into the cache, or goes from it, in one step.
    pub fn hold(&self, fingerprints: &[u64], comes: bool) {
        let base = root(Namespace { model: MODEL, adapter: "", salt: "" }, SEED);
        let mut sender = self.engine();
        for (at, fp) in fingerprints.iter().enumerate() {
            let parent = if at == 0 { Link::Root(base) } else { Link::Block(fingerprints[at - 1]) };
            sender.copy(KINDS[0], *fp, parent, comes);
        }
    }

    /// Tells what changed.
    pub async fn tell(&self) {
        say(&self.sender, &self.publisher, &self.name, false).await;
    }

    /// What changed is told to nobody: the message is lost.
    pub fn lose(&self) {
        self.engine().step(unix_ms(), false);
    }

    /// No more heartbeats, or heartbeats again.
    pub fn quiet(&self, quiet: bool) {
        self.quiet.store(quiet, std::sync::atomic::Ordering::Relaxed);
    }

    /// Sends any frames.
    pub async fn send(&self, frames: &[&[u8]]) -> Result<()> {
        let frames: Vec<bytes::Bytes> = frames.iter().map(|frame| bytes::Bytes::copy_from_slice(frame)).collect();
        let message = ZmqMessage::try_from(frames).map_err(|_| anyhow::anyhow!("an empty message"))?;
        Ok(self.publisher.lock().await.send(message).await?)
    }

    /// The topic of its stream.
    pub fn topic(&self) -> String {
        topic(&EngineId::new(self.name.clone(), 0))
    }

    /// Its entry in the fleet list.
    pub fn entry(&self) -> Entry {
        let json = json!({"name": self.name, "events": self.events, "control": self.control});
        serde_json::from_value(json).expect("an entry")
    }
}

async fn say(sender: &Mutex<Sender>, publisher: &tokio::sync::Mutex<PubSocket>, name: &str, beat: bool) {
    // Under the lock, so that what is told first is sent first.
    let mut publisher = publisher.lock().await;
    let told = sender.lock().unwrap_or_else(PoisonError::into_inner).step(unix_ms(), beat);
    let Some((seq, payload)) = told else { return };
    let topic = topic(&EngineId::new(name.to_string(), 0));
    let frames: Vec<bytes::Bytes> = vec![topic.into_bytes().into(), seq_frame(seq).to_vec().into(), payload.into()];
    let _ = publisher.send(ZmqMessage::try_from(frames).expect("three frames")).await;
}

/// A running index.
pub struct Running {
    pub handle: Handle,
    pub http: SocketAddr,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.handle.stop();
    }
}

impl Running {
    /// An index of these engines.
    pub async fn start(engines: &[&Publisher]) -> Result<Running> {
        Self::with(Config {
            fleet: FleetSource::Inline(engines.iter().map(|engine| engine.entry()).collect()),
            ..Config::default()
        })
        .await
    }

    /// An index of this configuration, on free ports and with the deployment's seed.
    pub async fn with(config: Config) -> Result<Running> {
        let free = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let handle = start(Config { http: free, grpc: free, seed: SEED, ..config }).await?;
        let http = handle.http.context("no HTTP")?;
        Ok(Running { handle, http })
    }

    /// A gRPC client.
    pub async fn grpc(&self) -> Result<IndexClient<tonic::transport::Channel>> {
        Ok(IndexClient::connect(format!("http://{}", self.handle.grpc.context("no gRPC")?)).await?)
    }

    /// One engine's row.
    pub async fn row(&self, engine: &str) -> Result<Value> {
        http::get(self.http, &format!("/v1/engines/{engine}")).await
    }

    /// The page of metrics.
    pub async fn metrics(&self) -> Result<String> {
        let (_, page) = http::exchange(self.http, "GET", "/metrics", None).await?;
        Ok(String::from_utf8_lossy(&page).into_owned())
    }

    /// Waits for an engine's state.
    pub async fn state(&self, engine: &str, state: &str) -> Result<()> {
        until(&format!("{engine} is {state}"), async || Ok(self.row(engine).await?["state"] == state)).await
    }

    /// The rows of a lookup of these tokens.
    pub async fn lookup(&self, tokens: std::ops::Range<u32>) -> Result<Vec<Value>> {
        let body = json!({"model": MODEL, "token_ids": tokens.collect::<Vec<u32>>()});
        let answer = http::post(self.http, "/v1/match", &body).await?;
        Ok(answer["engines"].as_array().cloned().unwrap_or_default())
    }

    /// Cached tokens of one engine for these tokens.
    pub async fn cached(&self, engine: &str, tokens: std::ops::Range<u32>) -> Result<u64> {
        let rows = self.lookup(tokens).await?;
        let row =
            rows.iter().find(|row| row["engine"] == engine).with_context(|| format!("{engine} is not in {rows:?}"))?;
        row["cached_tokens"].as_u64().context("no cached_tokens")
    }
}
