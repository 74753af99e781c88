//! A pick written down for people: `GET /v1/decisions`, `POST /v1/explain` and the log show the same.

use crate::decisions::{Considered, Decision, Left, MAX_CANDIDATES, Stages};
use crate::exchange::Ask;
use crate::pick::{Pick, Ranked};
use crate::prepare::Prepared;
use crate::score::Candidate;
use std::sync::Arc;

/// What a decision was about.
pub struct About<'a> {
    /// The request.
    pub ask: &'a Ask,
    /// What became of its body.
    pub prepared: &'a Prepared,
    /// The picker's id.
    pub request_id: String,
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Why cache knowledge was missing.
    pub degraded: Vec<&'static str>,
    /// Where the time went.
    pub stages: Stages,
    /// Whether the index answered.
    pub asked_index: bool,
    /// Whether an engine will report on it.
    pub placed: bool,
}

/// Writes a pick down.
pub fn decision(about: About<'_>, engines: &[Candidate], picked: &Pick) -> Decision {
    let prepared = about.prepared;
    let chosen = picked.chosen.map(|at| &engines[at]);
    let score_of = |at: usize| picked.ranked.iter().find(|ranked| ranked.at == at);
    let chosen_score = picked.chosen.and_then(score_of);
    // A prediction needs an exact prompt, an answer of the index and an engine that is told of in it.
    let exact = about.asked_index && prepared.exact;
    let predicted = chosen.filter(|c| exact && c.age_ms.is_some()).map(|c| c.cached_tokens);
    let would = picked.best.filter(|best| Some(*best) != picked.chosen);
    Decision {
        request_id: about.request_id,
        client_id: about.ask.client_id.clone(),
        at_ms: about.at_ms,
        path: about.ask.path.chars().take(256).collect(),
        model: prepared.model.chars().take(256).collect(),
        adapter: prepared.adapter.chars().take(256).collect(),
        prompt_tokens: (prepared.prompt_tokens > 0).then_some(prepared.prompt_tokens),
        prompt_exact: prepared.exact,
        blocks: prepared.chains.first().map_or(0, |chain| chain.fingerprints.len() as u32),
        engine: chosen.map(|c| Arc::clone(&c.engine.id)),
        address: chosen.map(|c| c.engine.address.to_string()),
        reason: picked.reason,
        degraded: about.degraded,
        would_pick: would.map(|at| Arc::clone(&engines[at].engine.id)),
        score: chosen_score.map_or(0.0, |ranked| ranked.rank),
        match_ratio: chosen.map_or(0.0, Candidate::cache),
        candidates: picked.ranked.iter().take(MAX_CANDIDATES).map(|ranked| considered(ranked, engines)).collect(),
        excluded: picked
            .excluded
            .iter()
            .take(MAX_CANDIDATES)
            .map(|(at, why)| Left { engine: Arc::clone(&engines[*at].engine.id), why: *why })
            .collect(),
        candidate_count: picked.ranked.len(),
        excluded_count: picked.excluded.len(),
        data_age_ms: chosen.and_then(|c| c.age_ms),
        stages: about.stages,
        available_tokens: engines.iter().map(|c| c.cached_tokens).max().unwrap_or(0),
        predicted_tokens: predicted,
        placed: about.placed && chosen.is_some(),
        several: prepared.several,
        delivered: None,
        class: None,
        finished: None,
    }
}

fn considered(ranked: &Ranked, engines: &[Candidate]) -> Considered {
    let candidate = &engines[ranked.at];
    Considered {
        engine: Arc::clone(&candidate.engine.id),
        score: ranked.rank,
        factors: ranked.scored.values.iter().copied().collect(),
        gpu_blocks: candidate.gpu_blocks,
        any_blocks: candidate.any_blocks,
        cached_tokens: candidate.cached_tokens,
        queue: candidate.queue,
        state: candidate.state,
        age_ms: candidate.age_ms,
        in_step: candidate.in_step,
        metadata: ranked.scored.metadata.iter().cloned().collect(),
    }
}
