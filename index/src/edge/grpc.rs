//! `kvatlas.index.v1.Index` over gRPC. Generated types stop here.

use super::watch::Watch;
use crate::answer::{
    Bundle, EngineMatch, EngineState, LifeStep, MAX_FINGERPRINTS, NoBundle, NotReserved, Placement, Query, RequestLife,
    Reserved, Status as Engine, Update,
};
use crate::app::Shared;
use proto::fleet::Source;
use proto::wire::kvatlas::index::v1 as wire;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::service::Interceptor;
use tonic::{Request, Response, Status};
use wire::index_server::{Index, IndexServer};

/// Longest request: [`MAX_FINGERPRINTS`] x 8 bytes, and names of candidates.
const MOST_BYTES: usize = MAX_FINGERPRINTS * 8 + (1 << 20);
/// Events that may wait in one watcher's connection, beside what the hub keeps for it.
const MOST_EVENTS: usize = 4;
/// Bytes of a bundle in one piece.
const PIECE_BYTES: usize = 1 << 20;
/// A watcher is written to at least so often, so that one that is gone is noticed.
const ALIVE: Duration = Duration::from_secs(10);

/// Listens, and serves until stopped. Returns where it listens.
///
/// # Errors
/// When the address is taken.
pub async fn serve(
    address: SocketAddr,
    shared: Arc<Shared>,
    mut stopped: watch::Receiver<bool>,
) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    let token = Token(shared.config.token.clone().map(|token| format!("Bearer {token}").into()));
    let server = IndexServer::new(Face { shared, stopped: stopped.clone() }).max_decoding_message_size(MOST_BYTES);
    let service = tonic::service::interceptor::InterceptedService::new(server, token);
    tokio::spawn(async move {
        let serving = tonic::transport::Server::builder()
            .tcp_nodelay(true)
            .concurrency_limit_per_connection(256)
            .http2_keepalive_interval(Some(ALIVE))
            .http2_keepalive_timeout(Some(ALIVE))
            .add_service(service)
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), async move {
                // An error says that every handle is gone: stop as well.
                let _ = stopped.wait_for(|stopped| *stopped).await;
            })
            .await;
        if let Err(error) = serving {
            tracing::error!(%error, "gRPC ended");
        }
    });
    tracing::info!(%address, "gRPC listens");
    Ok(address)
}

#[derive(Clone)]
struct Token(Option<Arc<str>>);

impl Interceptor for Token {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let Some(token) = &self.0 else { return Ok(request) };
        let given = request.metadata().get("authorization").map(|value| value.as_bytes()).unwrap_or_default();
        if !same(given, token.as_bytes()) {
            return Err(Status::unauthenticated("send the index's token as metadata `authorization: Bearer <token>`"));
        }
        Ok(request)
    }
}

/// Are they equal? Takes as long wherever they differ.
pub fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

struct Face {
    shared: Arc<Shared>,
    stopped: watch::Receiver<bool>,
}

#[tonic::async_trait]
impl Index for Face {
    async fn r#match(&self, request: Request<wire::MatchRequest>) -> Result<Response<wire::MatchResponse>, Status> {
        let asked = request.into_inner();
        if asked.fingerprints.len() > MAX_FINGERPRINTS {
            return Err(Status::invalid_argument(format!(
                "{} fingerprints; at most {MAX_FINGERPRINTS} are taken",
                asked.fingerprints.len()
            )));
        }
        if asked.block_size == 0 {
            return Err(Status::invalid_argument(
                "block_size is 0; send the tokens a block that the fingerprints were made with",
            ));
        }
        let query = Query {
            block_size: asked.block_size,
            ahead: asked.ahead,
            prompt_tokens: asked.prompt_tokens,
            fingerprints: &asked.fingerprints,
            candidates: &asked.candidates,
        };
        let matched = self.shared.metrics.timed_lookup(|| self.shared.lookup.find(&query));
        let engines = matched.engines.iter().map(of_match).collect();
        Ok(Response::new(wire::MatchResponse { engines, lookup_ns: matched.lookup_ns }))
    }

    async fn reserve(&self, request: Request<wire::ReserveRequest>) -> Result<Response<wire::ReserveResponse>, Status> {
        let wire::ReserveRequest { engine, request_id, fingerprints, tokens } = request.into_inner();
        let outcome = self.shared.lookup.reserve(Placement { engine, request_id, fingerprints, tokens });
        outcome.map(|()| Response::new(wire::ReserveResponse {})).map_err(|error| match &error {
            NotReserved::BadId(_) | NotReserved::TooLong(_) => Status::invalid_argument(error.to_string()),
            NotReserved::NoEngine(_) => Status::not_found(error.to_string()),
            NotReserved::Full(_) => Status::resource_exhausted(error.to_string()),
        })
    }

    async fn release(&self, request: Request<wire::ReleaseRequest>) -> Result<Response<wire::ReleaseResponse>, Status> {
        // Releasing what has ended already is no fault: engine and picker may both say so.
        self.shared.lookup.release(&request.into_inner().request_id);
        Ok(Response::new(wire::ReleaseResponse {}))
    }

    type WatchStream = ReceiverStream<Result<wire::WatchEvent, Status>>;

    async fn watch(&self, _: Request<wire::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (sender, receiver) = mpsc::channel(MOST_EVENTS);
        let (watch, shared, mut stopped) = (self.shared.hub.watch(), self.shared.clone(), self.stopped.clone());
        tokio::spawn(async move {
            tokio::select! {
                _ = pass_on(watch, &shared, &sender) => {}
                _ = stopped.wait_for(|stopped| *stopped) => {}
                _ = sender.closed() => {}
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    type GetBundleStream = ReceiverStream<Result<wire::BundlePiece, Status>>;

    async fn get_bundle(
        &self,
        request: Request<wire::BundleRequest>,
    ) -> Result<Response<Self::GetBundleStream>, Status> {
        let model = request.into_inner().model;
        let found = self.shared.bundles.get(&self.shared.lookup.board, &model);
        let Bundle { digest, bytes } = found.map_err(|error| match &error {
            NoBundle::NoModel(_) => Status::not_found(error.to_string()),
            NoBundle::NotYet(_) | NoBundle::Fetching(_) => Status::unavailable(error.to_string()),
        })?;
        let (sender, receiver) = mpsc::channel(2);
        tokio::spawn(async move {
            for piece in bytes.chunks(PIECE_BYTES) {
                let piece =
                    wire::BundlePiece { digest: digest.clone(), total: bytes.len() as u64, bytes: piece.to_vec() };
                if sender.send(Ok(piece)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

/// Writes updates to one watcher. While it is slow, the hub keeps a bounded number for it, and then tells it the whole
/// fleet again.
async fn pass_on(mut watch: Watch, shared: &Shared, sender: &mpsc::Sender<Result<wire::WatchEvent, Status>>) {
    while let Some(update) = watch.next().await {
        if update.missed > 0 {
            tracing::warn!(
                updates = update.missed,
                "a watcher was too slow: it is told the whole fleet again, lives of requests are lost to it"
            );
        }
        if sender.send(Ok(of_update(&update, shared))).await.is_err() {
            return;
        }
    }
}

fn of_state(state: EngineState) -> wire::EngineState {
    match state {
        EngineState::InStep => wire::EngineState::InStep,
        EngineState::Syncing => wire::EngineState::Syncing,
        EngineState::Late => wire::EngineState::Late,
        EngineState::Stale => wire::EngineState::Stale,
        EngineState::Partial => wire::EngineState::Partial,
        EngineState::Silent => wire::EngineState::Silent,
        EngineState::Mismatched => wire::EngineState::Mismatched,
        EngineState::Conflict => wire::EngineState::Conflict,
        EngineState::Shed => wire::EngineState::Shed,
    }
}

fn of_match(one: &EngineMatch) -> wire::EngineMatch {
    wire::EngineMatch {
        engine: one.status.engine.to_string(),
        gpu_blocks: one.gpu_blocks,
        any_blocks: one.any_blocks,
        cached_tokens: one.cached_tokens,
        coming_blocks: one.coming_blocks,
        state: of_state(one.state).into(),
        age_ms: one.age_ms,
        in_step: one.status.in_step.map(|in_step| in_step && one.state == EngineState::InStep),
        load: Some(of_load(&one.status, one.reserved)),
        seq: one.status.next.saturating_sub(1),
    }
}

fn of_load(status: &Engine, reserved: Reserved) -> wire::Load {
    let mut load =
        wire::Load { reserved: reserved.requests, reserved_tokens: reserved.tokens, health: 1.0, ..Default::default() };
    if let Some(state) = status.heartbeat.as_deref() {
        load.running = state.running;
        load.waiting = state.waiting;
        load.backlog_tokens = state.backlog_tokens;
        load.kv_use = state.kv_use;
        load.max_num_seqs = state.max_num_seqs;
        load.gpu_utilization = state.gpu_utilization;
        load.health = state.health;
        load.draining = state.draining;
        load.asleep = state.asleep;
        load.adapters = state.adapters.clone();
        load.adapters_running = state.adapters_running.clone();
        load.adapters_waiting = state.adapters_waiting.clone();
        load.adapters_cached = state.adapters_cached.clone();
        load.max_adapters = state.max_adapters;
    }
    load
}

fn of_update(update: &Update, shared: &Shared) -> wire::WatchEvent {
    let now_ms = shared.lookup.board.clock.now_ms();
    let engine = |status: &Arc<Engine>| wire::Engine {
        engine: status.engine.to_string(),
        address: status.address.clone().unwrap_or_default(),
        source: match status.source {
            Source::Agent => "agent".into(),
            Source::Native => "native".into(),
        },
        state: of_state(status.state_at(now_ms, &shared.lookup.board.leases)).into(),
        models: status.models().to_vec(),
        block_size: status.block_size(),
        ahead: status.rule().ahead(),
        epoch: status.epoch.map(|epoch| epoch.to_string()).unwrap_or_default(),
        load: Some(of_load(status, shared.lookup.reserved(status.slot))),
        bundle: status.bundle().into(),
        reason: status.reason.clone(),
        dp_size: status.heartbeat.as_ref().map_or(0, |state| state.dp_size),
        rank_header: status.heartbeat.as_ref().and_then(|state| state.rank_header),
        age_ms: status.age_ms(now_ms),
        check: status.heartbeat.as_ref().map_or(0, |state| state.check),
    };
    wire::WatchEvent {
        engines: update.engines.iter().map(engine).collect(),
        gone: update.gone.iter().map(ToString::to_string).collect(),
        lives: update.lives.iter().map(of_life).collect(),
        whole: update.whole,
        nodes: shared.metrics.core().used,
    }
}

fn of_life(life: &RequestLife) -> wire::RequestLife {
    use wire::request_life::{Arrived, Finished, Started, Step};
    let step = match &life.step {
        LifeStep::Arrived => Step::Arrived(Arrived {}),
        LifeStep::Started { prompt_tokens, cached_tokens, predicted_tokens } => Step::Started(Started {
            prompt_tokens: *prompt_tokens,
            cached_tokens: *cached_tokens,
            predicted_tokens: *predicted_tokens,
        }),
        LifeStep::Finished(reason) => Step::Finished(Finished { reason: reason.clone() }),
    };
    wire::RequestLife { request_id: life.request_id.clone(), engine: life.engine.to_string(), step: Some(step) }
}
