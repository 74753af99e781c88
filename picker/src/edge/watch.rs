//! What the index tells, taken in: the pool, the ledger, what became of decisions.

use super::bundles::Wanted;
use super::lookup::{Follower, LifeStep, News};
use super::router::Router;
use crate::pool::Sources;
use proto::fleet::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often placements that are too old are looked for.
const SWEEP: Duration = Duration::from_millis(500);

/// Joins the fleet list and the index's news into the router's pool.
pub struct Joiner {
    router: Arc<Router>,
    sources: Mutex<Sources>,
    wanted: Wanted,
}

impl Joiner {
    /// Begins with a fleet list.
    pub fn new(router: Arc<Router>, entries: Vec<Entry>, wanted: Wanted) -> Joiner {
        let sources = Mutex::new(Sources::new(router.config.seed));
        let joiner = Joiner { router, sources, wanted };
        joiner.fleet(entries);
        joiner
    }

    fn sources(&self) -> MutexGuard<'_, Sources> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fleet list is another now.
    pub fn fleet(&self, entries: Vec<Entry>) {
        let mut sources = self.sources();
        sources.fleet(entries);
        self.publish(&sources);
    }

    /// The guard of the sources is held, so pools are published in the order in which they were made.
    fn publish(&self, sources: &Sources) {
        let pool = Arc::new(sources.pool());
        let old = self.router.pool.swap(Arc::clone(&pool));
        for engine in &old.engines {
            if pool.engines.binary_search_by(|e| e.id.cmp(&engine.id)).is_err() {
                self.router.metrics.forget(&engine.id);
            }
        }
        self.wanted.see(&pool);
    }
}

impl Follower for Joiner {
    fn told(&self, news: News) {
        self.router.metrics.nodes(news.nodes);
        if news.whole || !news.engines.is_empty() || !news.gone.is_empty() {
            let mut sources = self.sources();
            sources.told(news.engines, &news.gone, news.whole);
            self.publish(&sources);
        }
        for life in news.lives {
            let joined = match life.step {
                LifeStep::Arrived => {
                    self.router.ledger().arrived(life.id);
                    None
                }
                LifeStep::Started(started) => {
                    self.router.ledger().arrived(life.id);
                    self.router.decisions().started(life.id, started)
                }
                LifeStep::Finished(reason) => {
                    self.router.ledger().end(life.id);
                    self.router.decisions().finished(life.id, reason)
                }
            };
            if let Some(joined) = joined {
                self.router.metrics.joined(&joined);
            }
        }
    }

    fn away(&self) {
        self.router.metrics.nodes(0);
        let mut sources = self.sources();
        sources.away();
        self.publish(&sources);
    }
}

/// Forgets placements that are too old, for ever.
pub async fn sweep(router: Arc<Router>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        let now_ms = router.clock.now_ms();
        let never_arrived = router.ledger().expire(now_ms);
        for id in never_arrived {
            router.index.release(uuid::Uuid::from_u128(id).to_string());
        }
    }
}
