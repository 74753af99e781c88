//! Counters. Names that begin with `epp_` are the specification's; the rest are `kvatlas_picker_`.

use crate::decisions::{Class, Decision, Joined};
use prometheus::core::Collector;
use prometheus::{
    Encoder, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};

/// Most values of one label that comes from clients (model, adapter): beyond it they are counted as `other`.
const MAX_LABELS: usize = 256;

/// All of them.
pub struct Metrics {
    registry: Registry,
    decisions: IntCounterVec,
    match_ratio: Histogram,
    composite: Histogram,
    latency_us: Histogram,
    queue_depth: IntGaugeVec,
    health_score: GaugeVec,
    candidates: IntGauge,
    tree_nodes: IntGauge,
    stale: IntCounter,
    adapter_loads: IntCounterVec,
    stages: HistogramVec,
    requests: IntCounterVec,
    tokens: IntCounterVec,
    degradations: IntCounterVec,
    refusals: IntCounterVec,
    scorer_faults: IntCounterVec,
    streams: IntGauge,
    in_flight: IntGauge,
    buffered_bytes: IntGauge,
    untold: IntGauge,
    index_followed: IntGauge,
    bundles: IntGauge,
    seen: std::sync::Mutex<std::collections::HashSet<(u8, String)>>,
}

fn buckets(per_decade: &[f64], from: i32, to: i32) -> Vec<f64> {
    (from..to).flat_map(|e| per_decade.iter().map(move |b| b * 10f64.powi(e))).collect()
}

impl Metrics {
    /// A registry with all of them at zero.
    ///
    /// # Errors
    /// When two have one name: a fault of this file.
    pub fn new() -> prometheus::Result<Metrics> {
        let registry = Registry::new();
        fn add<C: Collector + Clone + 'static>(
            registry: &Registry,
            made: prometheus::Result<C>,
        ) -> prometheus::Result<C> {
            let made = made?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        }
        let tenths: Vec<f64> = (1..=20).map(|i| f64::from(i) / 20.0).collect();
        let counter = |name: &str, help: &str, label: &str| IntCounterVec::new(Opts::new(name, help), &[label]);
        let r = &registry;
        let metrics = Metrics {
            decisions: add(r, counter("epp_routing_decisions_total", "Requests that were routed.", "model"))?,
            match_ratio: add(
                r,
                Histogram::with_opts(
                    HistogramOpts::new(
                        "epp_cache_match_ratio",
                        "Cached blocks of the prompt's blocks on the engine picked.",
                    )
                    .buckets(tenths.clone()),
                ),
            )?,
            composite: add(
                r,
                Histogram::with_opts(
                    HistogramOpts::new("epp_composite_score", "Weighted sum of the factors of the engine picked.")
                        .buckets(tenths),
                ),
            )?,
            latency_us: add(
                r,
                // With boundaries at 1,000 (wanted for 99 %) and 5,000 (alarm).
                Histogram::with_opts(
                    HistogramOpts::new("epp_scoring_latency_us", "Microseconds from the body's end to the verdict.")
                        .buckets(buckets(&[1.0, 2.0, 5.0], 1, 6)),
                ),
            )?,
            queue_depth: add(
                r,
                IntGaugeVec::new(
                    Opts::new("epp_queue_depth", "Requests waiting or coming, at the last decision."),
                    &["pod"],
                ),
            )?,
            health_score: add(
                r,
                GaugeVec::new(
                    Opts::new("epp_pod_health_score", "1 healthy, below 0.3 out, 0 failed or draining."),
                    &["pod"],
                ),
            )?,
            candidates: add(r, IntGauge::new("epp_candidate_pods", "Engines ranked at the last decision."))?,
            tree_nodes: add(
                r,
                IntGauge::new("epp_prefix_tree_nodes", "Different blocks that the index knows, 0 while it is away."),
            )?,
            stale: add(
                r,
                IntCounter::new(
                    "epp_stale_cache_routing_total",
                    "Requests to which less was delivered than predicted.",
                ),
            )?,
            adapter_loads: add(
                r,
                counter(
                    "epp_adapter_loads_triggered_total",
                    "Requests sent where their adapter was not loaded.",
                    "adapter",
                ),
            )?,
            stages: add(
                r,
                HistogramVec::new(
                    HistogramOpts::new("kvatlas_picker_stage_seconds", "Time of each stage of a decision.")
                        .buckets(buckets(&[1.0, 2.5, 5.0], -5, 0)),
                    &["stage"],
                ),
            )?,
            requests: add(
                r,
                counter("kvatlas_picker_requests_total", "Requests by what became of their prediction.", "class"),
            )?,
            tokens: add(
                r,
                counter(
                    "kvatlas_picker_cached_tokens_total",
                    "Cached tokens of reported requests: available anywhere, predicted for the chosen, delivered.",
                    "kind",
                ),
            )?,
            degradations: add(
                r,
                counter("kvatlas_picker_degradations_total", "Decisions without full cache knowledge.", "reason"),
            )?,
            refusals: add(
                r,
                counter("kvatlas_picker_refusals_total", "Requests answered by the picker itself.", "reason"),
            )?,
            scorer_faults: add(
                r,
                counter(
                    "kvatlas_picker_scorer_faults_total",
                    "Values of scorers that were NaN or outside [0,1].",
                    "scorer",
                ),
            )?,
            streams: add(r, IntGauge::new("kvatlas_picker_streams", "ext_proc streams open."))?,
            in_flight: add(r, IntGauge::new("kvatlas_picker_in_flight", "Placements that have not ended."))?,
            buffered_bytes: add(r, IntGauge::new("kvatlas_picker_buffered_bytes", "Bytes of request bodies held."))?,
            untold: add(
                r,
                IntGauge::new("kvatlas_picker_untold_placements", "Placements that an index could not be told of."),
            )?,
            index_followed: add(r, IntGauge::new("kvatlas_picker_index_followed", "1 while an index is followed."))?,
            bundles: add(r, IntGauge::new("kvatlas_picker_bundles", "Models whose tokenizer is loaded."))?,
            seen: std::sync::Mutex::default(),
            registry,
        };
        // So that they are shown before the first event.
        for class in Class::ALL {
            metrics.requests.with_label_values(&[class.name()]);
        }
        for kind in ["available", "chosen", "delivered"] {
            metrics.tokens.with_label_values(&[kind]);
        }
        Ok(metrics)
    }

    /// A label that clients choose, with a bound on how many there are.
    fn bounded<'a>(&self, family: u8, value: &'a str) -> &'a str {
        let mut seen = self.seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if seen.contains(&(family, value.to_owned())) {
            return value;
        }
        if seen.iter().filter(|(f, _)| *f == family).count() >= MAX_LABELS {
            return "other";
        }
        seen.insert((family, value.to_owned()));
        value
    }

    /// Counts a decision.
    pub fn decided(&self, decision: &Decision, known_model: bool) {
        let stages = &decision.stages;
        for (stage, us) in [
            ("wait", stages.wait_us),
            ("prepare", stages.prepare_us),
            ("lookup", stages.lookup_us),
            ("score", stages.score_us),
            ("total", stages.total_us),
        ] {
            self.stages.with_label_values(&[stage]).observe(us as f64 / 1e6);
        }
        for reason in &decision.degraded {
            self.degradations.with_label_values(&[reason]).inc();
        }
        self.candidates.set(decision.candidate_count as i64);
        for candidate in &decision.candidates {
            self.queue_depth.with_label_values(&[&candidate.engine]).set(i64::from(candidate.queue));
            if let Some(health) = candidate.factors.get("health") {
                self.health_score.with_label_values(&[&candidate.engine]).set(*health);
            }
        }
        if decision.engine.is_none() {
            return;
        }
        let model = if known_model { decision.model.as_str() } else { "unknown" };
        self.decisions.with_label_values(&[self.bounded(0, model)]).inc();
        self.match_ratio.observe(decision.match_ratio);
        self.composite.observe(decision.score);
        self.latency_us.observe(stages.total_us as f64);
        let chosen = decision.candidates.first();
        if !decision.adapter.is_empty() && chosen.is_some_and(|c| c.factors.get("adapter") == Some(&0.0)) {
            self.adapter_loads.with_label_values(&[self.bounded(1, &decision.adapter)]).inc();
        }
    }

    /// Health of an engine that was excluded for it.
    pub fn unhealthy(&self, engine: &str, health: f64) {
        self.health_score.with_label_values(&[engine]).set(health);
    }

    /// An engine that left the pool is shown no more.
    pub fn forget(&self, engine: &str) {
        // Not there: it was never shown.
        let _ = self.queue_depth.remove_label_values(&[engine]);
        let _ = self.health_score.remove_label_values(&[engine]);
    }

    /// Counts an answer of the picker itself.
    pub fn refused(&self, reason: &str) {
        self.refusals.with_label_values(&[reason]).inc();
    }

    /// Counts a scorer's fault.
    pub fn scorer_fault(&self, scorer: &str) {
        self.scorer_faults.with_label_values(&[scorer]).inc();
    }

    /// Counts what became of a prediction.
    pub fn joined(&self, joined: &Joined) {
        self.requests.with_label_values(&[joined.class.name()]).inc();
        self.tokens.with_label_values(&["available"]).inc_by(u64::from(joined.available_tokens));
        self.tokens.with_label_values(&["chosen"]).inc_by(u64::from(joined.chosen_tokens));
        self.tokens.with_label_values(&["delivered"]).inc_by(u64::from(joined.delivered_tokens.unwrap_or(0)));
        if joined.stale {
            self.stale.inc();
        }
    }

    /// Streams that are open.
    pub fn streams(&self) -> &IntGauge {
        &self.streams
    }

    /// Things that are read when somebody looks.
    pub fn set(&self, in_flight: usize, buffered: usize, untold: u64, followed: bool, bundles: usize) {
        self.in_flight.set(in_flight as i64);
        self.buffered_bytes.set(buffered as i64);
        self.untold.set(untold as i64);
        self.index_followed.set(i64::from(followed));
        self.bundles.set(bundles as i64);
    }

    /// Different blocks that the index knows.
    pub fn nodes(&self, nodes: u64) {
        self.tree_nodes.set(nodes as i64);
    }

    /// Everything in Prometheus' text format.
    pub fn text(&self) -> String {
        let mut out = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut out) {
            tracing::error!(%error, "metrics cannot be written");
        }
        String::from_utf8(out).unwrap_or_default()
    }
}
