//! What was decided lately, why, and what came of it. Bounded; the newest stay.

use crate::ledger::Id;
use crate::pick::Excluded;
use crate::pool::State;
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Decisions kept. With [`MAX_CANDIDATES`] at about 250 bytes each, at most 64 MiB.
pub const MAX_DECISIONS: usize = 4096;
/// Candidates, and exclusions, kept of one decision: the best. Larger pools are counted in full.
pub const MAX_CANDIDATES: usize = 64;

/// One engine as it looked.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Considered {
    /// `name.rank`.
    pub engine: Arc<str>,
    /// Weighted sum of the factors, or cost in tokens.
    pub score: f64,
    /// Each factor's value, 0 to 1.
    pub factors: HashMap<&'static str, f64>,
    /// Leading blocks of the prompt on GPU.
    pub gpu_blocks: u32,
    /// Leading blocks in all tiers.
    pub any_blocks: u32,
    /// Tokens that it would take from its cache, by the index.
    pub cached_tokens: u32,
    /// Requests waiting or coming.
    pub queue: u32,
    /// The index's view of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<State>,
    /// Age of what is known, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_ms: Option<u32>,
    /// Proved equal at its last heartbeat.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_step: Option<bool>,
    /// What scorers add.
    #[serde(skip_serializing_if = "HashMap::is_empty")]
    pub metadata: HashMap<&'static str, String>,
}

/// One engine that was not ranked.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Left {
    /// `name.rank`.
    pub engine: Arc<str>,
    /// Why.
    pub why: Excluded,
}

/// Where the time went, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Stages {
    /// From the body's end until a thread took it.
    pub wait_us: u64,
    /// Parse, render, tokenize, fingerprint.
    pub prepare_us: u64,
    /// Asking the index, with the way there and back.
    pub lookup_us: u64,
    /// Candidates, factors, pick.
    pub score_us: u64,
    /// From the body's end to the verdict.
    pub total_us: u64,
}

/// How a prediction fared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Delivered what was predicted.
    Exact,
    /// The engine's own prediction was right, the picker's older view was not.
    Raced,
    /// The engine's own prediction differs from what it delivered: a bug, always.
    Wrong,
    /// Routed without cache knowledge, or nothing was reported.
    Unknown,
}

impl Class {
    /// All of them.
    pub const ALL: [Class; 4] = [Class::Exact, Class::Raced, Class::Wrong, Class::Unknown];

    /// Its name in metrics and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Class::Exact => "exact",
            Class::Raced => "raced",
            Class::Wrong => "wrong",
            Class::Unknown => "unknown",
        }
    }
}

/// What the engine reported when it started a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Started {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens taken from its cache.
    pub cached_tokens: u32,
    /// What its agent's own set said at that instant.
    pub predicted_tokens: Option<u32>,
}

/// One decision.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decision {
    /// The picker's id, as sent upstream in `x-request-id`.
    pub request_id: String,
    /// The client's id.
    pub client_id: Option<String>,
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// `:path`.
    pub path: String,
    /// The model, by its first served name.
    pub model: String,
    /// The adapter, "" for none.
    pub adapter: String,
    /// Tokens of the prompt, `None` when unknown.
    pub prompt_tokens: Option<u32>,
    /// Whether they are exact.
    pub prompt_exact: bool,
    /// Full blocks with names.
    pub blocks: u32,
    /// `name.rank` of the engine that it went to; `None` when refused.
    pub engine: Option<Arc<str>>,
    /// Its address.
    pub address: Option<String>,
    /// Why this one.
    pub reason: &'static str,
    /// Why cache knowledge was missing, one word for each reason.
    pub degraded: Vec<&'static str>,
    /// In observe mode, the engine that would have been picked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub would_pick: Option<Arc<str>>,
    /// Score of the engine that it went to.
    pub score: f64,
    /// Its match: cached blocks of all blocks, 0 to 1.
    pub match_ratio: f64,
    /// The ranked, best first, at most [`MAX_CANDIDATES`].
    pub candidates: Vec<Considered>,
    /// The others, at most [`MAX_CANDIDATES`].
    pub excluded: Vec<Left>,
    /// How many were ranked.
    pub candidate_count: usize,
    /// How many were excluded.
    pub excluded_count: usize,
    /// Age of the chosen engine's data, in milliseconds.
    pub data_age_ms: Option<u32>,
    /// Stage times.
    pub stages: Stages,
    /// Best that any engine could have delivered, tokens.
    pub available_tokens: u32,
    /// Predicted for the chosen engine; `None` without cache knowledge.
    pub predicted_tokens: Option<u32>,
    /// Whether an engine will report on it.
    #[serde(skip)]
    pub placed: bool,
    /// Prompts in the body, and answers wanted for each: above 1 the engine starts several requests under one id.
    #[serde(skip)]
    pub several: bool,
    /// What the engine reported.
    pub delivered: Option<Started>,
    /// Its class, once reported.
    pub class: Option<Class>,
    /// Why the engine says it ended.
    pub finished: Option<String>,
}

impl Decision {
    /// The class that a report makes of this decision.
    pub fn classify(&self, started: Started) -> Class {
        if started.predicted_tokens.is_some_and(|own| own != started.cached_tokens) {
            return Class::Wrong;
        }
        match self.predicted_tokens {
            Some(predicted) if predicted == started.cached_tokens => Class::Exact,
            Some(_) if started.predicted_tokens.is_some() => Class::Raced,
            _ => Class::Unknown,
        }
    }
}

/// A decision whose class has become known, for the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Joined {
    /// Its class.
    pub class: Class,
    /// Best anywhere.
    pub available_tokens: u32,
    /// Predicted for the engine that was chosen, 0 when unknown.
    pub chosen_tokens: u32,
    /// Delivered; `None` when nothing was reported.
    pub delivered_tokens: Option<u32>,
    /// Whether less was delivered than predicted.
    pub stale: bool,
}

/// The ring.
#[derive(Debug)]
pub struct Decisions {
    /// Oldest first; the first has number `base`.
    ring: VecDeque<(Option<Id>, Decision)>,
    base: u64,
    limit: usize,
    by_id: HashMap<Id, u64>,
    by_client: HashMap<String, u64>,
}

impl Default for Decisions {
    fn default() -> Self {
        Decisions::new(MAX_DECISIONS)
    }
}

impl Decisions {
    /// A ring that keeps the newest `limit`.
    pub fn new(limit: usize) -> Decisions {
        let (by_id, by_client) = (HashMap::new(), HashMap::new());
        Decisions { ring: VecDeque::new(), base: 0, limit: limit.max(1), by_id, by_client }
    }

    /// Keeps one. `id` is absent for requests that were refused. Gives what is now known of one that had to go without
    /// ever being reported.
    pub fn push(&mut self, id: Option<Id>, decision: Decision) -> Option<Joined> {
        let mut lost = None;
        if self.ring.len() >= self.limit
            && let Some((old_id, old)) = self.ring.pop_front()
        {
            if let Some(old_id) = old_id
                && self.by_id.get(&old_id) == Some(&self.base)
            {
                self.by_id.remove(&old_id);
            }
            if let Some(client) = &old.client_id
                && self.by_client.get(client) == Some(&self.base)
            {
                self.by_client.remove(client);
            }
            self.base += 1;
            if old.class.is_none() && old.placed {
                lost = Some(joined(&old, Class::Unknown, None));
            }
        }
        let number = self.base + self.ring.len() as u64;
        if let Some(id) = id {
            self.by_id.insert(id, number);
        }
        if let Some(client) = &decision.client_id {
            self.by_client.insert(client.clone(), number);
        }
        self.ring.push_back((id, decision));
        lost
    }

    fn at(&mut self, id: Id) -> Option<&mut Decision> {
        let number = *self.by_id.get(&id)?;
        self.ring.get_mut((number - self.base) as usize).map(|(_, decision)| decision)
    }

    /// The engine started it. The first report that fits counts; an id under which the engine starts several requests
    /// (a list of prompts, `n` above 1) is joined by the one with the predicted prompt's length.
    pub fn started(&mut self, id: Id, started: Started) -> Option<Joined> {
        let decision = self.at(id)?;
        if decision.class.is_some() {
            return None;
        }
        if decision.several && decision.prompt_exact && decision.prompt_tokens != Some(started.prompt_tokens) {
            return None;
        }
        let class = decision.classify(started);
        decision.delivered = Some(started);
        decision.class = Some(class);
        Some(joined(decision, class, Some(started.cached_tokens)))
    }

    /// The engine ended it. Gives what is known when it never said that it started.
    pub fn finished(&mut self, id: Id, reason: String) -> Option<Joined> {
        let decision = self.at(id)?;
        decision.finished.get_or_insert(reason);
        if decision.class.is_some() {
            return None;
        }
        decision.class = Some(Class::Unknown);
        Some(joined(decision, Class::Unknown, None))
    }

    /// The newest, newest first.
    pub fn newest(&self, limit: usize) -> impl Iterator<Item = &Decision> {
        self.ring.iter().rev().take(limit).map(|(_, decision)| decision)
    }

    /// By the client's id, the newest of that id.
    pub fn of_client(&self, client: &str) -> Option<&Decision> {
        let number = *self.by_client.get(client)?;
        self.ring.get((number - self.base) as usize).map(|(_, decision)| decision)
    }

    /// By the picker's id.
    pub fn of_id(&self, id: Id) -> Option<&Decision> {
        let number = *self.by_id.get(&id)?;
        self.ring.get((number - self.base) as usize).map(|(_, decision)| decision)
    }
}

fn joined(decision: &Decision, class: Class, delivered_tokens: Option<u32>) -> Joined {
    Joined {
        class,
        available_tokens: decision.available_tokens,
        chosen_tokens: decision.predicted_tokens.unwrap_or(0),
        delivered_tokens,
        stale: matches!((decision.predicted_tokens, delivered_tokens), (Some(p), Some(d)) if d < p),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(client: &str, predicted: Option<u32>) -> Decision {
        Decision {
            request_id: String::new(),
            client_id: Some(client.into()),
            at_ms: 0,
            path: "/v1/completions".into(),
            model: "tiny".into(),
            adapter: String::new(),
            prompt_tokens: Some(100),
            prompt_exact: true,
            blocks: 6,
            engine: Some("a.0".into()),
            address: Some("127.0.0.1:1".into()),
            reason: "best",
            degraded: vec![],
            would_pick: None,
            score: 0.5,
            match_ratio: 0.5,
            candidates: vec![],
            excluded: vec![],
            candidate_count: 1,
            excluded_count: 0,
            data_age_ms: Some(3),
            stages: Stages::default(),
            available_tokens: 64,
            predicted_tokens: predicted,
            placed: true,
            several: false,
            delivered: None,
            class: None,
            finished: None,
        }
    }

    fn started(cached_tokens: u32, predicted_tokens: Option<u32>) -> Started {
        Started { prompt_tokens: 100, cached_tokens, predicted_tokens }
    }

    #[test]
    fn classes_follow_the_reports() {
        let class = |predicted, report| decision("c", predicted).classify(report);
        assert_eq!(class(Some(32), started(32, Some(32))), Class::Exact);
        assert_eq!(class(Some(32), started(32, None)), Class::Exact);
        assert_eq!(class(Some(48), started(32, Some(32))), Class::Raced);
        assert_eq!(class(Some(16), started(32, Some(32))), Class::Raced);
        assert_eq!(class(Some(48), started(32, None)), Class::Unknown);
        assert_eq!(class(None, started(32, Some(32))), Class::Unknown);
        for predicted in [None, Some(32), Some(16)] {
            assert_eq!(class(predicted, started(32, Some(16))), Class::Wrong, "{predicted:?}");
        }
    }

    #[test]
    fn reports_join_once() {
        let mut ring = Decisions::default();
        ring.push(Some(1), decision("c", Some(48)));
        let joined = ring.started(1, started(32, Some(32)));
        let want = Joined {
            class: Class::Raced,
            available_tokens: 64,
            chosen_tokens: 48,
            delivered_tokens: Some(32),
            stale: true,
        };
        assert_eq!(joined, Some(want));
        assert_eq!(ring.started(1, started(0, Some(0))), None);
        assert_eq!(ring.finished(1, "stop".into()), None);
        assert_eq!(ring.of_id(1).and_then(|d| d.finished.as_deref()), Some("stop"));
        assert_eq!(ring.of_client("c").and_then(|d| d.class), Some(Class::Raced));
        assert_eq!(ring.started(2, started(0, None)), None);
    }

    #[test]
    fn one_id_with_several_prompts_is_joined_by_its_own() {
        let mut ring = Decisions::default();
        ring.push(Some(1), Decision { several: true, ..decision("c", Some(32)) });
        assert_eq!(ring.started(1, Started { prompt_tokens: 7, ..started(0, Some(0)) }), None);
        assert_eq!(ring.started(1, started(32, Some(32))).map(|j| j.class), Some(Class::Exact));
    }

    #[test]
    fn what_is_never_reported_is_unknown_in_the_end() {
        let mut ring = Decisions::new(2);
        ring.push(Some(1), decision("c", Some(32)));
        assert_eq!(ring.push(Some(2), decision("d", Some(32))), None);
        assert_eq!(ring.finished(2, "abort".into()).map(|j| j.class), Some(Class::Unknown));
        assert_eq!(ring.push(Some(3), decision("e", None)).map(|j| j.class), Some(Class::Unknown));
        let beside = Decision { placed: false, ..decision("f", None) };
        assert_eq!(ring.push(Some(4), beside), None, "it was reported when it ended");
        assert_eq!(ring.push(Some(5), decision("g", None)).map(|j| j.class), Some(Class::Unknown));
        assert_eq!(ring.push(Some(6), decision("h", None)), None, "nobody was to report on it");
        assert!(ring.of_id(1).is_none() && ring.of_client("c").is_none() && ring.of_id(2).is_none());
        assert_eq!(ring.newest(9).map(|d| d.client_id.clone().unwrap_or_default()).collect::<Vec<_>>(), ["h", "g"]);
        assert_eq!((ring.by_id.len(), ring.by_client.len()), (2, 2));
    }

    #[test]
    fn a_repeated_client_id_finds_the_newest() {
        let mut ring = Decisions::new(2);
        ring.push(Some(1), decision("c", Some(1)));
        ring.push(Some(2), decision("c", Some(2)));
        assert_eq!(ring.of_client("c").and_then(|d| d.predicted_tokens), Some(2));
        ring.push(Some(3), decision("d", None));
        assert_eq!(ring.of_client("c").and_then(|d| d.predicted_tokens), Some(2));
    }
}
