//! The index put together: sockets, the writer, and what answers. Used by `kvatlas-index` and, as a library, by a
//! picker that runs its index inside.

use crate::answer::{Bundle, Matched, NoBundle, NotReserved, Placement, Query};
use crate::config::Config;
use crate::edge::board::{Board, Clock};
use crate::edge::bundles::Bundles;
use crate::edge::dialled::{self, Door};
use crate::edge::inbox::Questions;
use crate::edge::lookup::Lookup;
use crate::edge::metrics::Metrics;
use crate::edge::watch::{Hub, Watch};
use crate::edge::{fleet_file, grpc, http, scribe};
use crate::reservations::Reservations;
use crate::shared::{self, Limits};
use anyhow::Context;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// Everything that the faces of a running index share.
pub struct Shared {
    /// What was configured.
    pub config: Config,
    /// Lookups and placements.
    pub lookup: Lookup,
    /// Watchers.
    pub hub: Hub,
    /// Bundles.
    pub bundles: Arc<Bundles>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Questions to the writer, for the debug face.
    pub scribe: Questions,
}

/// A running index. Clones are handles on the same one; it stops when [`Handle::stop`] is called or all are dropped.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
    stop: Arc<watch::Sender<bool>>,
    /// Where HTTP listens.
    pub http: Option<SocketAddr>,
    /// Where gRPC listens.
    pub grpc: Option<SocketAddr>,
    /// Where agents may dial in.
    pub agents: Option<SocketAddr>,
}

/// Starts an index. Must be called inside a tokio runtime.
///
/// # Errors
/// When the configuration is refused or an address is taken.
pub async fn start(config: Config) -> anyhow::Result<Handle> {
    crate::config::check(&config)?;
    if config.seed == 0 {
        tracing::warn!("the seed is 0: fingerprints are unkeyed; set a seed, the same for agents and index");
    }
    let (writer, reader) = shared::open(Limits { spread: random(), ..Limits::default() });
    let board = Arc::new(Board::new(config.leases, Clock::start()));
    let book = Arc::new(Mutex::new(Reservations::default()));
    let hub = Hub::new(board.clone());
    let bundles = Arc::new(Bundles::default());
    let metrics = Arc::new(Metrics::new().context("metrics")?);
    let (stop, stopped) = watch::channel(false);
    let scribe = scribe::start(scribe::Setting {
        core: writer,
        board: board.clone(),
        book: book.clone(),
        hub: hub.clone(),
        bundles: bundles.clone(),
        metrics: metrics.clone(),
        seed: config.seed,
        reader_id: random(),
        secret: config.secret.clone(),
        agents_dial: config.agents.is_some(),
        memory_bytes: config.memory_bytes,
        stopped: stopped.clone(),
    })?;
    fleet_file::follow(config.fleet.clone(), scribe.fleet(), stopped.clone()).await?;
    let lookup = Lookup::new(board, book, reader);
    let shared = Arc::new(Shared { config, lookup, hub, bundles, metrics, scribe });
    let http = match shared.config.http {
        Some(address) => {
            let served = http::serve(address, shared.clone(), stopped.clone()).await;
            Some(served.with_context(|| format!("HTTP cannot listen on {address}"))?)
        }
        None => None,
    };
    let grpc = match shared.config.grpc {
        Some(address) => {
            let served = grpc::serve(address, shared.clone(), stopped.clone()).await;
            Some(served.with_context(|| format!("gRPC cannot listen on {address}"))?)
        }
        None => None,
    };
    let agents = match shared.config.agents {
        Some(address) => {
            if shared.config.secret.is_none() {
                tracing::warn!(%address, "no secret is set: whoever dials in is taken, under whatever name it says");
            }
            let door = Door { secret: shared.config.secret.clone(), inbox: shared.scribe.fleet() };
            let served = dialled::serve(address, door, stopped).await;
            Some(served.with_context(|| format!("agents cannot dial in on {address}"))?)
        }
        None => None,
    };
    Ok(Handle { shared, stop: Arc::new(stop), http, grpc, agents })
}

/// 64 bits that nobody outside can guess: the standard library's keys of hash maps come from the system.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

impl Handle {
    /// What would each engine take from its cache for this prompt, and how loaded is it? Never waits for the writer.
    pub fn match_(&self, query: &Query<'_>) -> Matched {
        self.shared.metrics.timed_lookup(|| self.shared.lookup.find(query))
    }

    /// Tells of a placement.
    ///
    /// # Errors
    /// When the engine is unknown, the id is no UUID, or the book is full.
    pub fn reserve(&self, placement: Placement) -> Result<(), NotReserved> {
        self.shared.lookup.reserve(placement)
    }

    /// Ends a placement. False when there was none.
    pub fn release(&self, request_id: &str) -> bool {
        self.shared.lookup.release(request_id)
    }

    /// The fleet: whole at first, then what changes and the lives of requests.
    pub fn watch(&self) -> Watch {
        self.shared.hub.watch()
    }

    /// Tokenizer, template and limits of a model, by any of its served names.
    ///
    /// # Errors
    /// When no engine serves it, or the bundle is not here yet.
    pub fn bundle(&self, model: &str) -> Result<Bundle, NoBundle> {
        self.shared.bundles.get(&self.shared.lookup.board, model)
    }

    /// Different blocks known now.
    pub fn nodes(&self) -> u64 {
        self.shared.metrics.core().used
    }

    /// Milliseconds since the index started: the clock of every [`crate::answer::Status`].
    pub fn now_ms(&self) -> u64 {
        self.shared.lookup.board.clock.now_ms()
    }

    /// After how long a silence an engine counts as what.
    pub fn leases(&self) -> crate::answer::Leases {
        self.shared.lookup.board.leases
    }

    /// Stops it: listeners close, connections are let go.
    pub fn stop(&self) {
        // Nobody listens: it is stopped already.
        let _ = self.stop.send(true);
    }
}
