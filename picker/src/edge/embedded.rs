//! An index inside this process: no socket between, a lookup is a function call.

use super::lookup::{Follower, Life, LifeStep, News, Placement, Question};
use crate::candidates::Found;
use crate::decisions::Started;
use crate::pool::{Knowledge, Load, State};
use index::answer::{self, EngineState};
use index::app::Handle;
use std::collections::HashMap;

/// The index.
pub struct Embedded {
    handle: Handle,
}

impl Embedded {
    /// Takes a running one.
    pub fn new(handle: Handle) -> Embedded {
        Embedded { handle }
    }

    /// Stops it.
    pub fn stop(&self) {
        self.handle.stop();
    }

    pub(super) fn find(&self, question: &Question) -> HashMap<String, Found> {
        let blocks = question.fingerprints.len().min(answer::MAX_FINGERPRINTS);
        let matched = self.handle.match_(&answer::Query {
            block_size: question.block_size,
            ahead: question.ahead,
            prompt_tokens: question.prompt_tokens,
            fingerprints: &question.fingerprints[..blocks],
            candidates: &[],
        });
        let blocks = blocks as u32;
        let engines = matched.engines.into_iter().map(|engine| {
            let found = Found {
                block_size: question.block_size,
                ahead: question.ahead,
                blocks,
                gpu_blocks: engine.gpu_blocks.min(blocks),
                any_blocks: engine.any_blocks.min(blocks),
                cached_tokens: engine.cached_tokens,
                state: state(engine.state),
                age_ms: engine.age_ms,
                in_step: engine.status.in_step,
                load: Load {
                    reserved: engine.reserved.requests,
                    reserved_tokens: engine.reserved.tokens,
                    ..load(&engine.status)
                },
            };
            (engine.status.engine.to_string(), found)
        });
        engines.collect()
    }

    pub(super) fn reserve(&self, placement: Placement) {
        let told = self.handle.reserve(answer::Placement {
            engine: placement.engine,
            request_id: placement.request_id,
            fingerprints: placement.fingerprints,
            tokens: placement.tokens,
        });
        if let Err(error) = told {
            tracing::debug!(%error, "a placement was not taken");
        }
    }

    pub(super) fn release(&self, request_id: &str) {
        self.handle.release(request_id);
    }

    pub(super) async fn follow(&self, follower: &dyn Follower) {
        let mut watch = self.handle.watch();
        while let Some(update) = watch.next().await {
            follower.told(self.news(&update));
        }
        follower.away();
        std::future::pending().await
    }

    fn news(&self, update: &answer::Update) -> News {
        let (now_ms, leases) = (self.handle.now_ms(), self.handle.leases());
        let engines = update.engines.iter().map(|status| {
            let heartbeat = status.heartbeat.as_deref();
            let knowledge = Knowledge {
                state: state(status.state_at(now_ms, &leases)),
                reason: status.reason.clone(),
                models: status.models().to_vec(),
                block_size: status.block_size(),
                ahead: status.rule().ahead(),
                load: load(status),
                bundle: status.bundle().to_owned(),
                address: status.address.as_deref().and_then(|address| address.parse().ok()),
                rank_header: heartbeat.and_then(|h| h.rank_header),
                check: heartbeat.map_or(0, |h| h.check),
            };
            (status.engine.to_string(), knowledge)
        });
        let lives = update.lives.iter().filter_map(|life| {
            let id = uuid::Uuid::parse_str(&life.request_id).ok()?.as_u128();
            let step = match &life.step {
                answer::LifeStep::Arrived => LifeStep::Arrived,
                answer::LifeStep::Started { prompt_tokens, cached_tokens, predicted_tokens } => {
                    LifeStep::Started(Started {
                        prompt_tokens: *prompt_tokens,
                        cached_tokens: *cached_tokens,
                        predicted_tokens: *predicted_tokens,
                    })
                }
                answer::LifeStep::Finished(reason) => LifeStep::Finished(reason.clone()),
            };
            Some(Life { id, step })
        });
        News {
            engines: engines.collect(),
            gone: update.gone.iter().map(ToString::to_string).collect(),
            lives: lives.collect(),
            whole: update.whole,
            nodes: self.handle.nodes(),
        }
    }

    pub(super) fn bundle(&self, model: &str) -> Result<(String, Vec<u8>), String> {
        let bundle = self.handle.bundle(model).map_err(|why| why.to_string())?;
        Ok((bundle.digest, bundle.bytes.to_vec()))
    }
}

fn state(state: EngineState) -> State {
    match state {
        EngineState::InStep => State::InStep,
        EngineState::Syncing => State::Syncing,
        EngineState::Late => State::Late,
        EngineState::Stale => State::Stale,
        EngineState::Partial => State::Partial,
        EngineState::Silent => State::Silent,
        EngineState::Mismatched => State::Mismatched,
        EngineState::Conflict => State::Conflict,
        EngineState::Shed => State::Shed,
    }
}

/// Without a heartbeat nothing is known: healthy and idle, as the fleet list says no worse.
fn load(status: &answer::Status) -> Load {
    let Some(told) = status.heartbeat.as_deref() else { return Load { health: 1.0, ..Load::default() } };
    Load {
        running: told.running,
        waiting: told.waiting,
        reserved: 0,
        reserved_tokens: 0,
        backlog_tokens: told.backlog_tokens,
        kv_use: told.kv_use,
        max_num_seqs: told.max_num_seqs,
        gpu_utilization: told.gpu_utilization,
        health: told.health,
        draining: told.draining,
        asleep: told.asleep,
        adapters: told.adapters.clone(),
        adapters_known: [&told.adapters_running[..], &told.adapters_waiting, &told.adapters_cached].concat(),
    }
}
