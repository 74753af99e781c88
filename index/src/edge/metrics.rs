//! `kvatlas_index_*`: counters of the running index, in base units.

use super::board::Board;
use super::lookup::Lookup;
use crate::answer::{EngineState, ResyncReason, Tally};
use crate::shared::Stats;
use arc_swap::ArcSwap;
use prometheus::{
    Encoder, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How many of the last measurements exact percentiles are taken of.
pub const RECENT: usize = 4096;

/// The last measurements, in seconds.
#[derive(Default)]
struct Ring {
    values: Vec<f32>,
    at: usize,
}

impl Ring {
    fn push(&mut self, value: f32) {
        if self.values.len() < RECENT {
            self.values.push(value);
        } else {
            self.values[self.at] = value;
            self.at = (self.at + 1) % RECENT;
        }
    }

    /// p50, p99 and the number of measurements they are of.
    fn percentiles(&self) -> Option<(f32, f32, usize)> {
        let mut sorted = self.values.clone();
        sorted.sort_by(f32::total_cmp);
        let at = |share: f64| sorted.get(((sorted.len() as f64 * share).ceil() as usize).saturating_sub(1)).copied();
        Some((at(0.50)?, at(0.99)?, sorted.len()))
    }
}

/// Everything that is counted outside the links.
pub struct Metrics {
    registry: Registry,
    lookups: Histogram,
    answerable: Histogram,
    recent_lookups: Mutex<Ring>,
    recent_answerable: Mutex<Ring>,
    recounts: IntCounter,
    miscounts: IntCounter,
    shed: IntCounter,
    core: ArcSwap<Stats>,
    scraped: Mutex<Scraped>,
}

/// What is taken from elsewhere when somebody scrapes.
struct Scraped {
    engines: IntGaugeVec,
    counters: IntCounterVec,
    resyncs: IntCounterVec,
    native: IntCounterVec,
    core: IntGaugeVec,
    placements: IntGauge,
    coming: IntGauge,
    /// By slot: tallies last seen, so that engines that left go on to count.
    tallies: BTreeMap<(u32, String), Tally>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Metrics {
    /// All at zero.
    ///
    /// # Errors
    /// When a metric is described wrongly: a fault of this file.
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let seconds =
            |name: &str, help: &str, buckets| Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets));
        let lookups = seconds(
            "kvatlas_index_lookup_seconds",
            "Time of one lookup, with the fleet's state and the placements.",
            prometheus::exponential_buckets(1e-6, 2.0, 16)?,
        )?;
        let answerable = seconds(
            "kvatlas_index_step_to_answerable_seconds",
            "From the end of an engine step to its changes being answerable. Engines on this machine only: clocks of two machines are never compared. In whole milliseconds.",
            vec![0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0],
        )?;
        let recounts = IntCounter::new("kvatlas_index_recounts_total", "Sets recounted in the table.")?;
        let miscounts = IntCounter::new(
            "kvatlas_index_miscounts_total",
            "Recounts that differed from the digest kept: faults of the index.",
        )?;
        let shed = IntCounter::new("kvatlas_index_shed_total", "Engines dropped for want of memory.")?;
        let scraped = Scraped {
            engines: IntGaugeVec::new(
                Opts::new("kvatlas_index_engines", "Engines of the fleet list, by state."),
                &["state"],
            )?,
            counters: IntCounterVec::new(
                Opts::new("kvatlas_index_stream_events_total", "What was counted about the engines' streams."),
                &["event"],
            )?,
            resyncs: IntCounterVec::new(
                Opts::new("kvatlas_index_resyncs_total", "Snapshots begun, by reason."),
                &["reason"],
            )?,
            native: IntCounterVec::new(
                Opts::new(
                    "kvatlas_index_native_total",
                    "What was counted of stock engines' own events, by engine and reason.",
                ),
                &["engine", "reason"],
            )?,
            core: IntGaugeVec::new(
                Opts::new(
                    "kvatlas_index_core",
                    "Sizes of the table and its sets: counts, and bytes where the name says so.",
                ),
                &["what"],
            )?,
            placements: IntGauge::new("kvatlas_index_placements", "Open placements.")?,
            coming: IntGauge::new("kvatlas_index_coming_blocks", "Blocks that are coming by open placements.")?,
            tallies: BTreeMap::new(),
        };
        registry.register(Box::new(lookups.clone()))?;
        registry.register(Box::new(answerable.clone()))?;
        for one in [&recounts, &miscounts, &shed] {
            registry.register(Box::new(one.clone()))?;
        }
        for one in [&scraped.engines, &scraped.core] {
            registry.register(Box::new(one.clone()))?;
        }
        for one in [&scraped.counters, &scraped.resyncs, &scraped.native] {
            registry.register(Box::new(one.clone()))?;
        }
        for one in [&scraped.placements, &scraped.coming] {
            registry.register(Box::new(one.clone()))?;
        }
        Ok(Self {
            registry,
            lookups,
            answerable,
            recent_lookups: Mutex::default(),
            recent_answerable: Mutex::default(),
            recounts,
            miscounts,
            shed,
            core: ArcSwap::from_pointee(Stats::default()),
            scraped: Mutex::new(scraped),
        })
    }

    /// Runs a lookup and notes how long it took.
    pub fn timed_lookup<T>(&self, lookup: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let found = lookup();
        let taken = started.elapsed().as_secs_f64();
        self.lookups.observe(taken);
        lock(&self.recent_lookups).push(taken as f32);
        found
    }

    /// An engine step became answerable after so long.
    pub fn step_to_answerable(&self, taken: Duration) {
        self.answerable.observe(taken.as_secs_f64());
        lock(&self.recent_answerable).push(taken.as_secs_f32());
    }

    /// p50, p99 and number of the last lookups, in seconds.
    pub fn recent_lookups(&self) -> Option<(f32, f32, usize)> {
        lock(&self.recent_lookups).percentiles()
    }

    /// p50, p99 and number of the last steps, in seconds.
    pub fn recent_answerable(&self) -> Option<(f32, f32, usize)> {
        lock(&self.recent_answerable).percentiles()
    }

    /// A set was recounted.
    pub fn recounted(&self) {
        self.recounts.inc();
    }

    /// A recount differed.
    pub fn miscounted(&self) {
        self.miscounts.inc();
    }

    /// An engine was dropped for want of memory.
    pub fn shed(&self) {
        self.shed.inc();
    }

    /// Sizes of the table, told by the writer now and then.
    pub fn set_core(&self, stats: Stats) {
        self.core.store(std::sync::Arc::new(stats));
    }

    /// Sizes of the table, at most a fraction of a second old.
    pub fn core(&self) -> Stats {
        **self.core.load()
    }

    /// Everything, in Prometheus' text format.
    ///
    /// # Errors
    /// When the encoder refuses: a fault of this file.
    pub fn scrape(&self, board: &Board, lookup: &Lookup) -> prometheus::Result<Vec<u8>> {
        let mut scraped = lock(&self.scraped);
        let Scraped { engines, counters, resyncs, native, core, placements, coming, tallies } = &mut *scraped;
        let now_ms = board.clock.now_ms();
        EngineState::ALL.iter().for_each(|state| engines.with_label_values(&[state.name()]).set(0));
        for seat in board.seats().iter() {
            let status = seat.status();
            engines.with_label_values(&[status.state_at(now_ms, &board.leases).name()]).inc();
            let engine = status.engine.to_string();
            for (reason, count) in status.native.iter().flat_map(|counters| counters.iter()) {
                let counter = native.with_label_values(&[engine.as_str(), reason]);
                counter.inc_by(count.saturating_sub(counter.get()));
            }
            let add = |event: &str, now: u64, before: u64| {
                counters.with_label_values(&[event]).inc_by(now.saturating_sub(before))
            };
            let now = status.tally;
            // Keyed by name too: a number in the table may have gone to another engine.
            let before = tallies.insert((status.slot, status.engine.name.clone()), now).unwrap_or_default();
            add("messages", now.messages, before.messages);
            add("bytes", now.bytes, before.bytes);
            add("stale", now.stale, before.stale);
            add("foreign", now.foreign, before.foreign);
            add("bad", now.bad, before.bad);
            add("gaps", now.gaps, before.gaps);
            add("replays", now.replays, before.replays);
            add("digest_checks", now.digest_checks, before.digest_checks);
            add("digest_failures", now.digest_failures, before.digest_failures);
            add("epochs", now.epochs, before.epochs);
            for reason in ResyncReason::ALL {
                let at = reason as usize;
                resyncs.with_label_values(&[reason.name()]).inc_by(now.resyncs[at].saturating_sub(before.resyncs[at]));
            }
        }
        let present = board.seats();
        tallies.retain(|(slot, _), _| present.iter().any(|seat| seat.slot == *slot));
        let stats = self.core();
        for (what, value) in [
            ("slots", stats.slots),
            ("blocks", stats.used),
            ("sets", stats.sets),
            ("holders", stats.holders),
            ("retired_holders", stats.retired),
            ("table_bytes", stats.table_bytes),
            ("sets_bytes", stats.sets_bytes),
            ("limbo_bytes", stats.limbo_bytes),
        ] {
            core.with_label_values(&[what]).set(i64::try_from(value).unwrap_or(i64::MAX));
        }
        let (open, blocks) = lookup.reservations();
        placements.set(open as i64);
        coming.set(blocks as i64);
        let mut out = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut out)?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_last_values() {
        let mut ring = Ring::default();
        assert_eq!(ring.percentiles(), None);
        (1..=100).for_each(|n| ring.push(n as f32));
        assert_eq!(ring.percentiles(), Some((50.0, 99.0, 100)));
        (0..RECENT).for_each(|_| ring.push(7.0));
        assert_eq!(ring.percentiles(), Some((7.0, 7.0, RECENT)));
    }
}
