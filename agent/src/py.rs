//! The skin for vLLM: reads Python objects and calls [`crate::engine::Engine`]. All of it runs on the scheduler's
//! thread, but for the bundle (a thread of its own) and the audit (the publisher's helper thread).
//!
//! Every method may raise; the wrappers in `python/kvatlas` catch and count. None of them waits.

use crate::adapters::Doing;
use crate::address::Http;
use crate::config;
use crate::edge::clock::Clock;
use crate::facts::{Counts, Facts};
use crate::gpus::Share;
use crate::plan::Plan;
use proto::event::Group;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

mod audit;
mod hits;
mod hooks;
mod read;
mod settings;

use audit::page;
use read::{Called, Ids, argument, block_id, called, described, ids, number, optional, plan, reports, tail, text};

/// The agent of one scheduler.
#[pyclass(module = "kvatlas._agent", weakref)]
struct Agent {
    running: Option<crate::Agent>,
    null_block: Option<u32>,
    publishes: bool,
    // The engine hashes where an adapter was loaded from.
    paths: bool,
    blocks: Vec<Option<u32>>,
    clock: Clock,
}

#[pymethods]
impl Agent {
    /// Starts an agent; `None` when the settings turn it off.
    #[staticmethod]
    #[pyo3(signature = (pool, models, block_size, total_blocks, groups, rank=0, dp_size=1, max_num_seqs=0, max_adapters=0, max_cached_adapters=0, gpus=None, engine_version="", rules=None, doubt=None, http=None))]
    #[allow(clippy::too_many_arguments)]
    fn start(
        pool: &Bound<'_, PyAny>,
        models: Vec<String>,
        block_size: u32,
        total_blocks: u32,
        groups: Vec<(String, u32, u32)>,
        rank: u32,
        dp_size: u32,
        max_num_seqs: u32,
        max_adapters: u32,
        max_cached_adapters: u32,
        gpus: Option<(usize, usize, Option<Vec<u32>>)>,
        engine_version: &str,
        rules: Option<&Bound<'_, PyDict>>,
        doubt: Option<&str>,
        http: Option<(Option<String>, Option<u16>, Option<u32>)>,
    ) -> PyResult<Option<Self>> {
        let config = match config::from_env() {
            Ok(Some(config)) => config,
            Ok(None) => return Ok(None),
            Err(error) => return Err(PyValueError::new_err(error.to_string())),
        };
        log_to_stderr(&config.log);
        if config.seed == 0 {
            tracing::warn!(
                "KVATLAS_SEED is not set: fingerprints are not keyed, who sees them can test guesses of prompts"
            );
        }
        let groups: Vec<Group> =
            groups.into_iter().map(|(kind, block_size, window)| Group { kind, block_size, window }).collect();
        // The engine's own search decides where hits end; what is not known is not published.
        let (plan, doubt) = match rules.map(plan) {
            Some(Ok(plan)) => (Some(plan), None),
            Some(Err(error)) => (None, Some(error.to_string())),
            None => (None, doubt.map(str::to_string)),
        };
        let known = plan.is_some();
        let plan = plan.unwrap_or_else(|| Plan::plain(block_size, [0, 0, 0]));
        if !known {
            tracing::warn!(
                ?groups,
                doubt,
                "this version does not know how far hits of this model reach: the engine is credited nothing"
            );
        }
        let facts = Facts {
            rank,
            dp_size,
            models,
            block_size: if known { plan.hits.unit } else { block_size },
            total_blocks,
            max_num_seqs,
            max_adapters,
            max_cached_adapters,
            share: gpus.map(|(place, world, ids)| Share { place, world, ids }).unwrap_or_default(),
            known,
            plan,
            groups,
            engine_version: engine_version.to_string(),
            http: http.map(|(host, port, rank_header)| Http { host, port, rank_header }).unwrap_or_default(),
        };
        let running = crate::Agent::start(&config, &facts).map_err(|e| PyRuntimeError::new_err(format!("{e:#}")))?;
        // Up to 0.13 the null block gets keys as any other does, and is hit by them.
        let skips_null = facts.plan.hits.version >= [0, 14, 0];
        let null_block = match optional(pool, intern!(pool.py(), "null_block"))?.filter(|_| skips_null) {
            Some(block) => Some(block_id(&block)?),
            None => None,
        };
        let audited = pool.clone().unbind();
        running
            .publisher
            .set_auditor(Box::new(move |from| Python::try_attach(|py| page(audited.bind(py), from).ok()).flatten()));
        let settled = pool.clone().unbind();
        running.publisher.set_settler(Box::new(move || {
            Python::try_attach(|py| hooks::settle(settled.bind(py)));
        }));
        let paths = facts.plan.hits.version >= [0, 31, 0];
        Ok(Some(Self {
            running: Some(running),
            null_block,
            publishes: known,
            paths,
            blocks: Vec::new(),
            clock: Clock::start(),
        }))
    }

    /// Where messages are published; "" when the agent was forgotten.
    #[getter]
    fn events(&self) -> &str {
        self.running.as_ref().map_or("", |agent| agent.publisher.events())
    }

    /// Where requests are answered.
    #[getter]
    fn control(&self) -> &str {
        self.running.as_ref().map_or("", |agent| agent.publisher.control())
    }

    /// Name and rank, `name.rank`.
    #[getter]
    fn engine(&self) -> String {
        self.running.as_ref().map_or(String::new(), |agent| agent.publisher.engine().to_string())
    }

    /// In a forked child: the thread stayed with the parent, so the handle is let go without a word.
    fn forget(&mut self) {
        std::mem::forget(self.running.take());
    }

    /// Stops the thread and closes the sockets.
    fn stop(&mut self) {
        self.running = None;
    }

    /// `Scheduler.add_request(request)` returned.
    fn arrived(&mut self, request: &Bound<'_, PyAny>) -> PyResult<()> {
        let Some(agent) = &mut self.running else { return Ok(()) };
        let made =
            described(request, self.paths, |request, items, nameable| agent.engine.arrived(request, items, nameable))?;
        number(request, made);
        Ok(())
    }

    /// The tokens of a live request were replaced.
    fn replaced(&mut self, request: &Bound<'_, PyAny>) -> PyResult<()> {
        let Some(agent) = &mut self.running else { return Ok(()) };
        follow(agent, request, self.paths)?;
        Ok(())
    }

    /// `KVCacheManager.get_computed_blocks(request)` returned `result`; `bypassed` says that it did not look, `None`
    /// that it looked by other rules, for a connector.
    #[pyo3(signature = (request, result, bypassed))]
    fn looked_up(
        &mut self,
        request: &Bound<'_, PyAny>,
        result: &Bound<'_, PyAny>,
        bypassed: Option<bool>,
    ) -> PyResult<()> {
        let Some(agent) = &mut self.running else { return Ok(()) };
        let py = request.py();
        let (mut name, tokens) = (called(request)?, ids(request)?);
        if !agent.engine.knows(name.which()) {
            name = follow(agent, request, self.paths)?;
        }
        let delivered: usize = result.get_item(1)?.extract()?;
        let tokens = Ids(&tokens);
        match bypassed {
            Some(bypassed) => agent.engine.looked_up(name.which(), &tokens, tokens.0.len(), delivered, bypassed),
            None => agent.engine.looked_up_elsewhere(name.which(), delivered),
        }
        if agent.engine.lost() > 0 && self.publishes {
            let groups = result.get_item(0)?.getattr(intern!(py, "blocks"))?;
            for (group, blocks) in (0..).zip(groups.try_iter()?) {
                self.blocks.clear();
                for block in blocks?.try_iter()? {
                    self.blocks.push(Some(block_id(&block?)?).filter(|id| Some(*id) != self.null_block));
                }
                // A hit may end inside its last block: that one keeps its loss.
                self.blocks.truncate(agent.engine.whole_blocks(group, delivered));
                agent.engine.hit(name.which(), &tokens, group, &self.blocks);
            }
        }
        Ok(())
    }

    /// `BlockPool.cache_full_blocks(**kwargs)` returned; see [`hooks::hook_cached`].
    fn cached(&mut self, kwargs: &Bound<'_, PyDict>) -> PyResult<()> {
        let Some(agent) = &mut self.running else { return Ok(()) };
        let py = kwargs.py();
        let first: usize = argument(kwargs, intern!(py, "num_cached_blocks"))?.extract()?;
        let end: usize = argument(kwargs, intern!(py, "num_full_blocks"))?.extract()?;
        if !self.publishes || first >= end {
            return Ok(());
        }
        let group: u32 = argument(kwargs, intern!(py, "kv_cache_group_id"))?.extract()?;
        let request = argument(kwargs, intern!(py, "request"))?;
        let blocks = argument(kwargs, intern!(py, "blocks"))?.cast_into::<PyList>()?;
        let mask = kwargs.get_item(intern!(py, "block_mask"))?.filter(|mask| !mask.is_none());
        self.blocks.clear();
        for at in first..end {
            let id = block_id(&blocks.get_item(at)?)?;
            let masked = match &mask {
                Some(mask) => !mask.get_item(at - first)?.is_truthy()?,
                None => false,
            };
            self.blocks.push((!masked && Some(id) != self.null_block).then_some(id));
        }
        let mut name = called(&request)?;
        let tokens = ids(&request)?;
        let tokens = Ids(&tokens);
        if !agent.engine.cached(name.which(), &tokens, group, first, &self.blocks) {
            name = follow(agent, &request, self.paths)?;
            if !agent.engine.cached(name.which(), &tokens, group, first, &self.blocks) {
                agent.engine.cached_by_stranger(group, &self.blocks);
            }
        }
        if agent.engine.wants_hashes(group) {
            let hashes = request.getattr(intern!(py, "block_hashes"))?;
            let units = agent.engine.units(group);
            let tails: PyResult<Vec<u64>> =
                (first..end).map(|at| tail(&hashes.get_item((at + 1) * units - 1)?)).collect();
            agent.engine.hashed(name.which(), group, first, &tails?);
        }
        Ok(())
    }

    /// A KV connector keeps blocks in tiers below the GPU and reports of them: `factor` blocks of the GPU make one
    /// below; `lasting` says that it reports removals too.
    fn follow_tiers(&mut self, factor: usize, lasting: bool) {
        if let Some(agent) = &mut self.running {
            agent.engine.follow_tiers(factor, lasting);
        }
    }

    /// The connector's `take_events` gave these.
    fn reported(&mut self, events: &Bound<'_, PyList>) -> PyResult<()> {
        let Some(agent) = self.running.as_mut().filter(|_| self.publishes) else { return Ok(()) };
        let mut all = Vec::new();
        for event in events {
            reports(&event, &mut all)?;
        }
        agent.engine.reported(all.into_iter(), self.clock.now_ms());
        Ok(())
    }

    /// `BlockPool.cache_partial_block(**kwargs)` of `pool` returned `key`: the block can be hit at a place inside it.
    fn cached_partial(
        &mut self,
        pool: &Bound<'_, PyAny>,
        kwargs: &Bound<'_, PyDict>,
        key: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let Some(agent) = self.running.as_mut().filter(|_| self.publishes && !key.is_none()) else { return Ok(()) };
        let py = kwargs.py();
        let block = argument(kwargs, intern!(py, "block"))?;
        let group: u32 = argument(kwargs, intern!(py, "kv_cache_group_id"))?.extract()?;
        let end: usize = argument(kwargs, intern!(py, "num_tokens"))?.extract()?;
        let request = argument(kwargs, intern!(py, "request"))?;
        let (mut name, tokens, block) = (called(&request)?, ids(&request)?, block_id(&block)?);
        // What the block had before is gone unless the pool keeps further keys of it.
        let more = pool.getattr(intern!(py, "cached_block_hashes_by_block"))?.cast_into::<PyDict>()?;
        let alone = more.get_item(block)?.is_none_or(|keys| keys.is_truthy().is_ok_and(|some| !some));
        let tokens = Ids(&tokens);
        if !agent.engine.cached_partial(name.which(), &tokens, group, block, end, alone) {
            name = follow(agent, &request, self.paths)?;
            agent.engine.cached_partial(name.which(), &tokens, group, block, end, alone);
        }
        Ok(())
    }

    /// `BlockPool.move_block_hashes(from, to)` returned.
    fn moved(&mut self, from: &Bound<'_, PyAny>, to: &Bound<'_, PyAny>) -> PyResult<()> {
        let Some(agent) = self.running.as_mut().filter(|_| self.publishes) else { return Ok(()) };
        agent.engine.moved(block_id(from)?, block_id(to)?);
        Ok(())
    }

    /// `BlockPool.get_new_blocks` returned these: they have no key any more.
    fn handed_out(&mut self, blocks: &Bound<'_, PyList>) -> PyResult<()> {
        let Some(agent) = self.running.as_mut().filter(|_| self.publishes) else { return Ok(()) };
        self.blocks.clear();
        for block in blocks {
            self.blocks.push(Some(block_id(&block)?));
        }
        agent.engine.evicted(self.blocks.iter().flatten().copied());
        Ok(())
    }

    /// `BlockPool.evict_blocks` took the keys of the blocks with these ids.
    fn evicted(&mut self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let Some(agent) = &mut self.running else { return Ok(()) };
        self.blocks.clear();
        for block in blocks.try_iter()? {
            self.blocks.push(Some(block?.extract()?));
        }
        agent.engine.evicted(self.blocks.iter().flatten().copied());
        Ok(())
    }

    /// `BlockPool.reset_prefix_cache` emptied the cache.
    fn cleared(&mut self) {
        if let Some(agent) = &mut self.running {
            agent.engine.cleared();
        }
    }

    /// `Scheduler.schedule` returned `output`.
    fn scheduled(&mut self, output: &Bound<'_, PyAny>) -> PyResult<()> {
        let Some(agent) = &mut self.running else { return Ok(()) };
        let py = output.py();
        for new in output.getattr(intern!(py, "scheduled_new_reqs"))?.try_iter()? {
            agent.engine.started(&text(&new?.getattr(intern!(py, "req_id"))?)?);
        }
        let (prefilling, adapted) = (agent.engine.prefilling() > 0, agent.engine.adapted());
        if prefilling || adapted {
            let tokens = output.getattr(intern!(py, "num_scheduled_tokens"))?.cast_into::<PyDict>()?;
            for (id, count) in tokens {
                let id = text(&id)?;
                if prefilling {
                    agent.engine.progressed(&id, count.extract()?);
                }
                if adapted {
                    agent.engine.runs(&id);
                }
            }
            if adapted {
                agent.engine.ran();
            }
        }
        Ok(())
    }

    /// `EngineCore.add_lora` returned: the adapter is loaded, `in_place` of itself or unless it was.
    #[pyo3(signature = (name, in_place=false))]
    fn adapter_added(&mut self, name: &str, in_place: bool) {
        if let Some(agent) = &mut self.running {
            agent.engine.adapter_done(if in_place { Doing::Reload } else { Doing::Add }, name);
        }
    }

    /// `EngineCore.remove_lora` returned.
    fn adapter_removed(&mut self, name: &str) {
        if let Some(agent) = &mut self.running {
            agent.engine.adapter_done(Doing::Remove, name);
        }
    }

    /// `EngineCore.pin_lora` returned.
    fn adapter_pinned(&mut self, name: &str) {
        if let Some(agent) = &mut self.running {
            agent.engine.adapter_done(Doing::Pin, name);
        }
    }

    /// The engine sleeps now, or does not any more.
    fn asleep(&mut self, asleep: bool) {
        if let Some(agent) = &mut self.running {
            agent.engine.asleep(asleep);
        }
    }

    /// The engine takes no new requests now, or takes them again.
    fn draining(&mut self, draining: bool) {
        if let Some(agent) = &mut self.running {
            agent.engine.draining(draining);
        }
    }

    /// A step of the scheduler `ended`, or the first part of one: its counts are read and the publisher is woken.
    fn step(&mut self, scheduler: &Bound<'_, PyAny>, ended: bool) -> PyResult<()> {
        let Some(agent) = &mut self.running else { return Ok(()) };
        let py = scheduler.py();
        let (running, waiting) = scheduler.call_method0(intern!(py, "get_request_counts"))?.extract()?;
        let manager = scheduler.getattr(intern!(py, "kv_cache_manager"))?;
        let kv_use = manager.getattr(intern!(py, "usage"))?.extract()?;
        agent.engine.counts(Counts { running, waiting, kv_use, backlog_tokens: 0 });
        if agent.engine.follows_tiers() {
            // What was reported long ago may be over.
            agent.engine.reported(std::iter::empty(), self.clock.now_ms());
        }
        if ended {
            agent.engine.step_ended()
        } else {
            agent.engine.tell()
        }
        Ok(())
    }

    /// A request ended.
    fn finished(&mut self, id: &str, reason: &str) {
        if let Some(agent) = &mut self.running {
            agent.engine.finished(id, reason);
        }
    }

    /// A hook failed. With `pool`, one that follows the pool's blocks: what they hold is read anew, without names.
    #[pyo3(signature = (pool=None))]
    fn fault(&mut self, pool: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let Some(agent) = &mut self.running else { return Ok(()) };
        agent.engine.fault();
        if let Some(pool) = pool.filter(|_| self.publishes) {
            self.blocks.clear();
            for block in pool.getattr(intern!(pool.py(), "blocks"))?.try_iter()? {
                let block = block?;
                if !block.getattr(intern!(pool.py(), "block_hash"))?.is_none() {
                    self.blocks.push(Some(block_id(&block)?));
                }
            }
            agent.engine.lose(self.blocks.iter().flatten().copied());
        }
        Ok(())
    }

    /// For tests: the publisher's thread sleeps for so many seconds, as on a machine that gives it no time.
    fn _hold(&self, seconds: f64) -> PyResult<()> {
        let time = std::time::Duration::try_from_secs_f64(seconds).map_err(|e| PyValueError::new_err(e.to_string()))?;
        if let Some(agent) = &self.running {
            agent.publisher.hold(time);
        }
        Ok(())
    }

    /// Gives the bundle, once. False when it is too large or was given before.
    fn set_bundle(&self, bundle: &[u8]) -> bool {
        self.running.as_ref().is_some_and(|agent| agent.publisher.set_bundle(bundle.to_vec()))
    }
}

/// Follows a request that is live already, under a new number, by which it is called from now on.
fn follow(agent: &mut crate::Agent, request: &Bound<'_, PyAny>, paths: bool) -> PyResult<Called> {
    let made = described(request, paths, |request, items, nameable| agent.engine.follow(request, items, nameable))?;
    number(request, made);
    Ok(Called::Number(made))
}

/// Log lines go where vLLM's go. A second scheduler in one process keeps the first one's level.
fn log_to_stderr(level: &str) {
    let level = level.parse().unwrap_or(tracing::Level::INFO);
    let _ = tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).with_max_level(level).try_init();
}

/// The native part of kvatlas.
#[pymodule]
fn _agent(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Agent>()?;
    module.add_function(wrap_pyfunction!(hooks::hook_cached, module)?)?;
    module.add_function(wrap_pyfunction!(hooks::hook_handed_out, module)?)?;
    module.add_function(wrap_pyfunction!(settings::settings, module)?)?;
    module.add_function(wrap_pyfunction!(hits::find_hit, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
