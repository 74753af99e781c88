//! Indexes in other processes, by gRPC. One is followed and asked; all are told of placements.

use super::lookup::{Follower, Life, LifeStep, MAX_FINGERPRINTS, News, NoAnswer, Placement, Question};
use crate::candidates::Found;
use crate::decisions::Started;
use crate::pool::{Knowledge, Load, State};
use proto::control::MAX_BUNDLE_BYTES;
use proto::wire::kvatlas::index::v1 as wire;
use proto::wire::kvatlas::index::v1::index_client::IndexClient;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};

/// Largest answer taken: 1,024 engines of 256 adapters each stay below it.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Placements that wait to be told to one index: 1,024 x [`super::lookup::MAX_RESERVED`] x 8 bytes are 256 MiB at worst,
/// 2 MiB for prompts of 4,096 tokens.
const OUTBOX: usize = 1024;
/// A placement not told within this time is not worth telling.
const OUTBOX_AGE: Duration = Duration::from_secs(2);
/// How long one telling may take.
const TELL: Duration = Duration::from_millis(500);
/// How long a watch may take to begin.
const BEGIN: Duration = Duration::from_secs(1);
/// Between two rounds over all addresses that all failed.
const AGAIN: Duration = Duration::from_millis(200);
/// An index that failed a lookup is not asked for so long, so that not every request waits for it.
const SUSPECT_MS: u64 = 250;
/// [`Remote::current`] while none is followed.
const NOBODY: usize = usize::MAX;

enum Telling {
    Reserve(Instant, Placement),
    Release(String),
}

struct Peer {
    address: String,
    client: IndexClient<Channel>,
    outbox: mpsc::Sender<Telling>,
    /// Milliseconds since the start until which it is not asked.
    suspect_ms: AtomicU64,
}

/// Why indexes cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BadIndex {
    /// No address.
    #[error("an address of the index is none: {0}")]
    Address(#[from] tonic::transport::Error),
    /// No header value.
    #[error("the token of the index cannot be sent: {0}")]
    Token(#[from] tonic::metadata::errors::InvalidMetadataValue),
}

/// Indexes by address.
pub struct Remote {
    peers: Vec<Peer>,
    current: AtomicUsize,
    start: Instant,
    untold: AtomicU64,
    token: Option<MetadataValue<Ascii>>,
}

impl Remote {
    /// Connects when needed. Must be called inside a tokio runtime. `token`: what the indexes want as bearer.
    ///
    /// # Errors
    /// When an address or the token has characters that they cannot have.
    pub fn new(addresses: &[String], token: Option<&str>) -> Result<Remote, BadIndex> {
        let token = token.map(|token| format!("Bearer {token}").parse()).transpose()?;
        let mut peers = Vec::with_capacity(addresses.len());
        for address in addresses {
            let endpoint = Endpoint::from_shared(format!("http://{address}"))?
                .connect_timeout(Duration::from_millis(500))
                // A hung or cut-off index is noticed within 1.5 s even when nothing is asked.
                .http2_keep_alive_interval(Duration::from_millis(500))
                .keep_alive_timeout(Duration::from_secs(1))
                .keep_alive_while_idle(true);
            let client = IndexClient::new(endpoint.connect_lazy()).max_decoding_message_size(MAX_ANSWER_BYTES);
            let (outbox, told) = mpsc::channel(OUTBOX);
            tokio::spawn(tell(client.clone(), token.clone(), told));
            peers.push(Peer { address: address.clone(), client, outbox, suspect_ms: AtomicU64::new(0) });
        }
        let current = AtomicUsize::new(NOBODY);
        Ok(Remote { peers, current, start: Instant::now(), untold: AtomicU64::new(0), token })
    }

    fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    pub(super) async fn find(
        &self,
        mut question: Question,
        deadline: Instant,
    ) -> Result<HashMap<String, Found>, NoAnswer> {
        let current = self.current.load(Ordering::Relaxed);
        if current == NOBODY {
            return Err(NoAnswer::Away);
        }
        question.fingerprints.truncate(MAX_FINGERPRINTS);
        let (block_size, ahead, blocks) = (question.block_size, question.ahead, question.fingerprints.len() as u32);
        let mut request = wire::MatchRequest {
            root: question.root,
            block_size,
            prompt_tokens: question.prompt_tokens,
            fingerprints: question.fingerprints,
            candidates: Vec::new(),
            ahead,
        };
        let now_ms = self.now_ms();
        let well = |at: &usize| self.peers[*at].suspect_ms.load(Ordering::Relaxed) <= now_ms;
        let order = std::iter::once(current).chain((0..self.peers.len()).filter(|at| *at != current));
        let order: Vec<usize> = order.filter(well).collect();
        let mut why = NoAnswer::Away;
        for (turn, at) in order.iter().enumerate() {
            let peer = &self.peers[*at];
            let last = turn + 1 == order.len();
            let left = deadline.saturating_duration_since(Instant::now());
            let share = if last { left } else { left / 2 };
            let message = if last { std::mem::take(&mut request) } else { request.clone() };
            let mut client = peer.client.clone();
            match tokio::time::timeout(share, client.r#match(self.signed(message))).await {
                Ok(Ok(answer)) => return Ok(found(answer.into_inner(), (block_size, ahead), blocks)),
                Ok(Err(status)) => {
                    tracing::debug!(index = peer.address, %status, "a lookup failed");
                    why = NoAnswer::Away;
                }
                Err(_) => why = NoAnswer::Slow,
            }
            peer.suspect_ms.store(self.now_ms() + SUSPECT_MS, Ordering::Relaxed);
        }
        Err(why)
    }

    fn signed<T>(&self, message: T) -> tonic::Request<T> {
        sign(message, self.token.as_ref())
    }

    pub(super) fn reserve(&self, placement: Placement) {
        for peer in &self.peers {
            self.post(peer, Telling::Reserve(Instant::now(), placement.clone()));
        }
    }

    pub(super) fn release(&self, request_id: String) {
        for peer in &self.peers {
            self.post(peer, Telling::Release(request_id.clone()));
        }
    }

    fn post(&self, peer: &Peer, telling: Telling) {
        if peer.outbox.try_send(telling).is_err() {
            self.untold.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn untold(&self) -> u64 {
        self.untold.load(Ordering::Relaxed)
    }

    pub(super) async fn follow(&self, follower: &dyn Follower) {
        let mut said = false;
        loop {
            for (at, peer) in self.peers.iter().enumerate() {
                match self.follow_one(at, peer, follower).await {
                    Ok(()) => said = false,
                    Err(why) if !said => tracing::warn!(index = peer.address, why, "the index is not reached"),
                    Err(_) => {}
                }
                if self.current.swap(NOBODY, Ordering::Relaxed) != NOBODY {
                    tracing::warn!(index = peer.address, "the index is away: routing by load");
                    follower.away();
                    // The preferred one may be back.
                    break;
                }
            }
            said = true;
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn follow_one(&self, at: usize, peer: &Peer, follower: &dyn Follower) -> Result<(), String> {
        let mut client = peer.client.clone();
        let begin = async {
            let mut events = client.watch(self.signed(wire::WatchRequest {})).await?.into_inner();
            let first = events.message().await?;
            Ok::<_, tonic::Status>((events, first))
        };
        let (mut events, first) = match tokio::time::timeout(BEGIN, begin).await {
            Ok(Ok(begun)) => begun,
            Ok(Err(status)) => return Err(status.to_string()),
            Err(_) => return Err("it does not answer".into()),
        };
        let mut event = first;
        while let Some(one) = event {
            let news = news(one);
            if news.whole {
                tracing::info!(index = peer.address, engines = news.engines.len(), "following the index");
            }
            follower.told(news);
            self.current.store(at, Ordering::Relaxed);
            peer.suspect_ms.store(0, Ordering::Relaxed);
            event = events.message().await.map_err(|status| status.to_string())?;
        }
        Ok(())
    }

    pub(super) async fn bundle(&self, model: &str) -> Result<(String, Vec<u8>), String> {
        let current = self.current.load(Ordering::Relaxed);
        let Some(peer) = self.peers.get(current) else { return Err("the index is away".into()) };
        let mut client = peer.client.clone();
        let fetch = async {
            let request = self.signed(wire::BundleRequest { model: model.to_owned() });
            let mut pieces = client.get_bundle(request).await.map_err(|s| s.message().to_owned())?.into_inner();
            let (mut digest, mut bytes) = (String::new(), Vec::new());
            while let Some(piece) = pieces.message().await.map_err(|s| s.message().to_owned())? {
                if bytes.len() + piece.bytes.len() > MAX_BUNDLE_BYTES {
                    return Err(format!("the bundle is longer than {MAX_BUNDLE_BYTES} bytes"));
                }
                bytes.extend_from_slice(&piece.bytes);
                digest = piece.digest;
            }
            Ok((digest, bytes))
        };
        // 128 MiB within a minute is 2 MiB a second.
        tokio::time::timeout(Duration::from_secs(60), fetch)
            .await
            .unwrap_or_else(|_| Err("it took over a minute".into()))
    }
}

fn sign<T>(message: T, token: Option<&MetadataValue<Ascii>>) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", token.clone());
    }
    request
}

/// Tells one index, in order.
async fn tell(
    mut client: IndexClient<Channel>,
    token: Option<MetadataValue<Ascii>>,
    mut outbox: mpsc::Receiver<Telling>,
) {
    while let Some(telling) = outbox.recv().await {
        let told = match telling {
            Telling::Reserve(at, placement) if at.elapsed() < OUTBOX_AGE => {
                let request = wire::ReserveRequest {
                    engine: placement.engine,
                    request_id: placement.request_id,
                    fingerprints: placement.fingerprints,
                    tokens: placement.tokens,
                };
                tokio::time::timeout(TELL, client.reserve(sign(request, token.as_ref()))).await.map(|r| r.map(drop))
            }
            Telling::Reserve(..) => continue,
            Telling::Release(request_id) => {
                let request = sign(wire::ReleaseRequest { request_id }, token.as_ref());
                tokio::time::timeout(TELL, client.release(request)).await.map(|r| r.map(drop))
            }
        };
        match told {
            Ok(Ok(())) => {}
            // The placement ends by itself at the index, and this picker's own ledger counts it meanwhile.
            Ok(Err(status)) => tracing::debug!(%status, "a placement was not taken"),
            Err(_) => tracing::debug!("a placement was not told in time"),
        }
    }
}

fn found(answer: wire::MatchResponse, (block_size, ahead): (u32, u32), blocks: u32) -> HashMap<String, Found> {
    let engines = answer.engines.into_iter().map(|engine| {
        let found = Found {
            block_size,
            ahead,
            blocks,
            gpu_blocks: engine.gpu_blocks.min(blocks),
            any_blocks: engine.any_blocks.min(blocks),
            cached_tokens: engine.cached_tokens,
            state: state(engine.state),
            age_ms: engine.age_ms,
            in_step: engine.in_step,
            load: load(engine.load),
        };
        (engine.engine, found)
    });
    engines.collect()
}

/// A state that this picker does not know is credited nothing.
fn state(told: i32) -> State {
    use wire::EngineState as E;
    match E::try_from(told) {
        Ok(E::InStep) => State::InStep,
        Ok(E::Syncing) => State::Syncing,
        Ok(E::Late) => State::Late,
        Ok(E::Partial) => State::Partial,
        Ok(E::Silent) => State::Silent,
        Ok(E::Mismatched) => State::Mismatched,
        Ok(E::Conflict) => State::Conflict,
        Ok(E::Shed) => State::Shed,
        Ok(E::Stale | E::Unspecified) | Err(_) => State::Stale,
    }
}

/// Without a load nothing is known: healthy and idle, as the fleet list says no worse.
fn load(told: Option<wire::Load>) -> Load {
    let Some(told) = told else { return Load { health: 1.0, ..Load::default() } };
    Load {
        running: told.running,
        waiting: told.waiting,
        reserved: told.reserved,
        reserved_tokens: told.reserved_tokens,
        backlog_tokens: told.backlog_tokens,
        kv_use: told.kv_use,
        max_num_seqs: told.max_num_seqs,
        gpu_utilization: told.gpu_utilization,
        health: told.health,
        draining: told.draining,
        asleep: told.asleep,
        adapters: told.adapters,
        adapters_known: [told.adapters_running, told.adapters_waiting, told.adapters_cached].concat(),
    }
}

fn news(event: wire::WatchEvent) -> News {
    let engines = event.engines.into_iter().map(|engine| {
        let knowledge = Knowledge {
            state: state(engine.state),
            reason: engine.reason,
            models: engine.models,
            block_size: engine.block_size,
            ahead: engine.ahead,
            load: load(engine.load),
            bundle: engine.bundle,
            address: engine.address.parse().ok(),
            rank_header: engine.rank_header,
            check: engine.check,
        };
        (engine.engine, knowledge)
    });
    let lives = event.lives.into_iter().filter_map(|life| {
        let id = uuid::Uuid::parse_str(&life.request_id).ok()?.as_u128();
        let step = match life.step? {
            wire::request_life::Step::Arrived(_) => LifeStep::Arrived,
            wire::request_life::Step::Started(started) => LifeStep::Started(Started {
                prompt_tokens: started.prompt_tokens,
                cached_tokens: started.cached_tokens,
                predicted_tokens: started.predicted_tokens,
            }),
            wire::request_life::Step::Finished(finished) => LifeStep::Finished(finished.reason),
        };
        Some(Life { id, step })
    });
    News {
        engines: engines.collect(),
        lives: lives.collect(),
        gone: event.gone,
        whole: event.whole,
        nodes: event.nodes,
    }
}
