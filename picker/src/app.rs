//! The picker put together. Used by `kvatlas-picker` and by tests.

use crate::config::{Config, FleetSource, IndexSource, check, first_fleet, read_bundles};
use crate::edge::embedded::Embedded;
use crate::edge::ext_proc::Stopping;
use crate::edge::lookup::Index;
use crate::edge::metrics::Metrics;
use crate::edge::remote::Remote;
use crate::edge::render::RenderPool;
use crate::edge::router::Router;
use crate::edge::watch::Joiner;
use crate::edge::{admin, bundles, ext_proc, files, watch as told};
use anyhow::Context;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Health says so for this long before new streams are refused: Envoy checks twice a second.
const NOTICE: Duration = Duration::from_millis(1500);
/// Requests whose body is still coming may finish for so long.
const DRAIN: Duration = Duration::from_secs(10);
/// What is failed after that is told within this time.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A running picker.
pub struct Handle {
    /// Where ext_proc listens.
    pub ext_proc: SocketAddr,
    /// Where gRPC health listens.
    pub health: SocketAddr,
    /// Where HTTP listens.
    pub http: SocketAddr,
    stopping: watch::Sender<Stopping>,
    reporter: tonic_health::server::HealthReporter,
    serving: tokio::task::JoinHandle<()>,
    /// Aborted when dropped.
    background: JoinSet<()>,
    router: Arc<Router>,
}

/// Starts a picker. Must be called inside a tokio runtime.
///
/// # Errors
/// When the configuration is refused, a file cannot be read or an address is taken.
pub async fn start(config: Config) -> anyhow::Result<Handle> {
    check(&config)?;
    if config.seed == 0 {
        tracing::warn!("the seed is 0: fingerprints are unkeyed; set a seed, the same for agents and picker");
    }
    let (entries, file) = first_fleet(&config.fleet)?;
    let bundles_given = read_bundles(&config.models)?;
    let index = match &config.index {
        IndexSource::None => Index::None,
        IndexSource::Addresses(addresses) => Index::Remote(Remote::new(addresses, config.index_token.as_deref())?),
        IndexSource::Embedded => Index::Embedded(Embedded::new(embedded(&config).await?)),
    };
    let render = RenderPool::start(config.render_threads, config.render_limit).context("no threads to tokenize")?;
    let (ext_proc_at, health_at, http_at) = (config.ext_proc, config.health, config.http);
    let router = Arc::new(Router::new(config, index, render, Metrics::new().context("metrics")?));
    let local = bundles::load_local(&router, bundles_given).await?;
    let wanted = bundles::Wanted::new();
    let joiner = Arc::new(Joiner::new(Arc::clone(&router), entries.clone(), wanted.clone()));

    let (stopping, stopped) = watch::channel(Stopping::No);
    let listener = bind(ext_proc_at, "ext_proc").await?;
    let ext_proc = listener.local_addr()?;
    let admin_listener = bind(http_at, "http").await?;
    let http = admin_listener.local_addr()?;
    let health_listener = bind(health_at, "health").await?;
    let health = health_listener.local_addr()?;

    let mut background = JoinSet::new();
    background.spawn(told::sweep(Arc::clone(&router)));
    background.spawn(bundles::follow(Arc::clone(&router), wanted, local));
    if let Some(path) = file {
        let joiner = Arc::clone(&joiner);
        background.spawn(files::watch(path, entries, move |entries| joiner.fleet(entries)));
    }
    let following = Arc::clone(&router);
    background.spawn(async move { following.index.follow(joiner).await });
    let (admin_router, admin_stopped) = (Arc::clone(&router), stopped.clone());
    background.spawn(async move {
        if let Err(error) = admin::serve(admin_listener, admin_router, admin_stopped).await {
            tracing::error!(%error, "HTTP ended");
        }
    });
    let (service_router, service_stopped) = (Arc::clone(&router), stopped.clone());
    let serving = tokio::spawn(async move {
        if let Err(error) = ext_proc::serve(listener, service_router, service_stopped).await {
            tracing::error!(%error, "ext_proc ended");
        }
    });
    // Last: who is told that the picker is there finds everything in place.
    let reporter = ext_proc::serve_health(health_listener, stopped).await;
    tracing::info!(%ext_proc, %health, %http, "the picker is there");
    Ok(Handle { ext_proc, health, http, stopping, reporter, serving, background, router })
}

async fn bind(address: SocketAddr, name: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("{name} cannot listen on {address}"))
}

async fn embedded(config: &Config) -> anyhow::Result<index::app::Handle> {
    let fleet = match &config.fleet {
        FleetSource::Inline(entries) => index::config::FleetSource::Inline(entries.clone()),
        FleetSource::File(path) => index::config::FleetSource::File(path.clone()),
    };
    let config = index::config::Config { http: None, grpc: None, fleet, seed: config.seed, ..Default::default() };
    index::app::start(config).await.context("the index inside the picker")
}

impl Handle {
    /// Placements that have not ended.
    pub fn in_flight(&self) -> usize {
        self.router.ledger().len()
    }

    /// Bytes of request bodies held.
    pub fn buffered_bytes(&self) -> usize {
        self.router.buffered.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Stops: health says so first, then no new streams are taken, those that are answered end, those that are not may
    /// finish, and what is left is failed. No stream ends as if it had been answered.
    pub async fn stop(mut self) {
        ext_proc::unhealthy(&self.reporter).await;
        tokio::time::sleep(NOTICE).await;
        self.stop_now(DRAIN).await;
    }

    /// The same without notice: for tests, and for people who are in a hurry.
    pub async fn stop_now(&mut self, drain: Duration) {
        ext_proc::unhealthy(&self.reporter).await;
        self.stopping.send_replace(Stopping::Draining);
        if tokio::time::timeout(drain, &mut self.serving).await.is_err() {
            self.stopping.send_replace(Stopping::Now);
            if tokio::time::timeout(LAST_WORDS, &mut self.serving).await.is_err() {
                self.serving.abort();
            }
        }
        self.stopping.send_replace(Stopping::Now);
        self.background.abort_all();
        if let Index::Embedded(index) = &self.router.index {
            index.stop();
        }
        tracing::info!("stopped");
    }
}
