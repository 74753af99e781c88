//! An index that says what a test wants, to see what a picker makes of it.

use anyhow::Result;
use picker::bundle::digest;
use proto::wire::kvatlas::index::v1::index_server::{Index, IndexServer};
use proto::wire::kvatlas::index::v1::{
    BundlePiece, BundleRequest, Engine, EngineMatch, EngineState, Load, MatchRequest, MatchResponse, ReleaseRequest,
    ReleaseResponse, RequestLife, ReserveRequest, ReserveResponse, WatchEvent, WatchRequest,
};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::TcpListener;
use tokio::sync::{broadcast, oneshot};
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

/// Pieces of a bundle.
const PIECE: usize = 64 << 10;

/// What it knows, and what it was told.
#[derive(Default)]
pub struct Says {
    /// Engines, in order.
    pub engines: Vec<Engine>,
    /// Blocks that each engine holds, by fingerprint: its leading ones are what a match answers.
    pub holds: HashMap<String, Vec<u64>>,
    /// The bundle of every model.
    pub bundle: Vec<u8>,
    /// Different blocks that it says it knows.
    pub nodes: u64,
    /// Lookups are never answered.
    pub hangs: bool,
    /// Lookups asked.
    pub lookups: usize,
    /// Placements told.
    pub reserved: Vec<ReserveRequest>,
    /// Placements taken back.
    pub released: Vec<String>,
}

/// A running one. It stops, and closes every connection, when dropped.
pub struct FakeIndex {
    says: Arc<Mutex<Says>>,
    events: broadcast::Sender<WatchEvent>,
    stop: Option<oneshot::Sender<()>>,
    serving: Option<std::thread::JoinHandle<()>>,
    /// Where it listens.
    pub address: SocketAddr,
}

#[derive(Clone)]
struct Service {
    says: Arc<Mutex<Says>>,
    events: broadcast::Sender<WatchEvent>,
}

/// An engine that is in step, with blocks of 16 tokens, idle, and hashing with that seed.
pub fn engine(id: &str, model: &str, seed: u64, bundle: &[u8]) -> Engine {
    Engine {
        engine: id.into(),
        source: "agent".into(),
        state: EngineState::InStep as i32,
        models: vec![model.into(), "alias".into()],
        block_size: 16,
        load: Some(Load { health: 1.0, max_num_seqs: 8, adapters: vec!["lora".into()], ..Load::default() }),
        bundle: digest(bundle),
        dp_size: 1,
        rank_header: None,
        check: proto::block::check(model, seed, 16),
        ..Engine::default()
    }
}

impl FakeIndex {
    /// Starts one, on `address` or on any free port. It has a runtime of its own, so that stopping it cuts connections
    /// as the death of a process does.
    ///
    /// # Errors
    /// When the address is taken.
    pub fn start(says: Says, address: Option<SocketAddr>) -> Result<FakeIndex> {
        let says = Arc::new(Mutex::new(says));
        let events = broadcast::Sender::new(1024);
        let service = Service { says: Arc::clone(&says), events: events.clone() };
        let (stop, stopped) = oneshot::channel();
        let (bound, address_of) = std::sync::mpsc::channel();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let serving = std::thread::spawn(move || {
            runtime.block_on(async move {
                let at = address.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
                let listener = TcpListener::bind(at).await;
                let told = listener
                    .as_ref()
                    .map_err(|e| e.to_string())
                    .and_then(|l| l.local_addr().map_err(|e| e.to_string()));
                // The starter is gone: so is the need.
                let _ = bound.send(told);
                let Ok(listener) = listener else { return };
                let server = Server::builder().add_service(IndexServer::new(service));
                tokio::select! {
                    _ = server.serve_with_incoming(TcpIncoming::from(listener)) => {}
                    _ = stopped => {}
                }
            });
        });
        let address = address_of.recv()?.map_err(anyhow::Error::msg)?;
        Ok(FakeIndex { says, events, stop: Some(stop), serving: Some(serving), address })
    }

    /// What it knows and was told.
    pub fn says(&self) -> MutexGuard<'_, Says> {
        lock(&self.says)
    }

    /// Tells every watcher of what changed.
    pub fn tell(&self, event: WatchEvent) {
        // Nobody watches: nobody is told.
        let _ = self.events.send(event);
    }

    /// Tells every watcher of a step in a request's life.
    pub fn life(&self, life: RequestLife) {
        let nodes = self.says().nodes;
        self.tell(WatchEvent { lives: vec![life], nodes, ..WatchEvent::default() });
    }
}

impl Drop for FakeIndex {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // It has ended by itself.
            let _ = stop.send(());
        }
        if let Some(serving) = self.serving.take() {
            let _ = serving.join();
        }
    }
}

fn lock(says: &Mutex<Says>) -> MutexGuard<'_, Says> {
    says.lock().unwrap_or_else(PoisonError::into_inner)
}

type Watching = Pin<Box<dyn Stream<Item = Result<WatchEvent, Status>> + Send>>;
type Pieces = Pin<Box<dyn Stream<Item = Result<BundlePiece, Status>> + Send>>;

#[tonic::async_trait]
impl Index for Service {
    type WatchStream = Watching;
    type GetBundleStream = Pieces;

    async fn r#match(&self, request: Request<MatchRequest>) -> Result<Response<MatchResponse>, Status> {
        let asked = request.into_inner();
        let hangs = {
            let mut says = lock(&self.says);
            says.lookups += 1;
            says.hangs
        };
        if hangs {
            std::future::pending::<()>().await;
        }
        let says = lock(&self.says);
        let engines = says.engines.iter().map(|engine| {
            let holds = says.holds.get(&engine.engine).map(Vec::as_slice).unwrap_or_default();
            let depth = asked.fingerprints.iter().zip(holds).take_while(|(a, b)| a == b).count();
            let size = asked.block_size as usize;
            EngineMatch {
                engine: engine.engine.clone(),
                gpu_blocks: depth as u32,
                any_blocks: depth as u32,
                cached_tokens: proto::block::cached_tokens(depth, size, asked.prompt_tokens as usize) as u32,
                state: engine.state,
                age_ms: 5,
                in_step: Some(true),
                load: engine.load.clone(),
                ..EngineMatch::default()
            }
        });
        Ok(Response::new(MatchResponse { engines: engines.collect(), lookup_ns: 1 }))
    }

    async fn reserve(&self, request: Request<ReserveRequest>) -> Result<Response<ReserveResponse>, Status> {
        lock(&self.says).reserved.push(request.into_inner());
        Ok(Response::new(ReserveResponse {}))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<ReleaseResponse>, Status> {
        lock(&self.says).released.push(request.into_inner().request_id);
        Ok(Response::new(ReleaseResponse {}))
    }

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Watching>, Status> {
        // Subscribed first: what changes in between is told twice, never missed.
        let changes = BroadcastStream::new(self.events.subscribe());
        let whole = {
            let says = lock(&self.says);
            WatchEvent { engines: says.engines.clone(), whole: true, nodes: says.nodes, ..WatchEvent::default() }
        };
        let changes = changes.map(|event| event.map_err(|_| Status::data_loss("too slow")));
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(whole)).chain(changes))))
    }

    async fn get_bundle(&self, _: Request<BundleRequest>) -> Result<Response<Pieces>, Status> {
        let bundle = lock(&self.says).bundle.clone();
        if bundle.is_empty() {
            return Err(Status::not_found("no bundle"));
        }
        let (digest, total) = (digest(&bundle), bundle.len() as u64);
        let pieces: Vec<_> = bundle
            .chunks(PIECE)
            .map(|bytes| Ok(BundlePiece { digest: digest.clone(), total, bytes: bytes.to_vec() }))
            .collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(pieces))))
    }
}
