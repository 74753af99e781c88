//! Which engine, and why. The same code runs in the picker, in `POST /v1/explain` and in simulations.

use crate::score::{Asked, Candidate, Factors, Scored, View};
use crate::subset::Subset;

/// Health below this is out: running requests finish, new ones do not come.
pub const MIN_HEALTH: f64 = 0.3;
/// Scores closer than this are equal: sums of the same numbers in floating point.
const EQUAL: f64 = 1e-9;

/// How engines are ranked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// The weighted sum of the factors; most wins.
    #[default]
    FiveFactor,
    /// Tokens of work until the first token; least wins.
    LeastWork,
}

/// Whether the ranking is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// It is.
    #[default]
    Route,
    /// Requests go to the engine with the fewest, and the ranking is only noted.
    Observe,
}

/// Everything that a pick depends on beside the engines.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Factors and weights.
    pub factors: Factors,
    /// A queue this long is full.
    pub max_queue: u32,
    /// How engines are ranked.
    pub profile: Profile,
    /// Whether the ranking is followed.
    pub mode: Mode,
    /// `least-work`: how much a token of this request weighs more for each request that waits, on the pool's mean.
    pub crowding: f64,
}

/// Why an engine was not ranked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Excluded {
    /// Outside the gateway's subset.
    Subset,
    /// Serves other models.
    Model,
    /// Draining.
    Draining,
    /// Asleep.
    Asleep,
    /// Health below [`MIN_HEALTH`].
    Health,
    /// Queue at or above the limit, while others have room.
    QueueFull,
    /// Silent for its lease, while others are not.
    Silent,
}

/// An engine that was ranked.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranked {
    /// Position in the candidates.
    pub at: usize,
    /// Score of the five factors, or the cost in tokens where least work is asked for.
    pub rank: f64,
    /// What the factors say, in any profile.
    pub scored: Scored,
}

/// The outcome.
#[derive(Debug, Clone, PartialEq)]
pub struct Pick {
    /// Position of the engine that the request goes to; `None` when nobody may have it.
    pub chosen: Option<usize>,
    /// Position of the best by the ranking: the same, but in observe mode.
    pub best: Option<usize>,
    /// Best first.
    pub ranked: Vec<Ranked>,
    /// The others, with reasons.
    pub excluded: Vec<(usize, Excluded)>,
    /// Why this one, in a few words.
    pub reason: &'static str,
}

/// Picks. `serves` says of each candidate whether it serves the model, `seed` decides what nothing else does.
pub fn pick(
    policy: &Policy,
    asked: &Asked,
    candidates: &[Candidate],
    subset: Option<&Subset>,
    serves: impl Fn(&Candidate) -> bool,
    seed: u64,
) -> Pick {
    let mut excluded = Vec::new();
    let mut left: Vec<usize> = Vec::with_capacity(candidates.len());
    for (at, candidate) in candidates.iter().enumerate() {
        let why = if subset.is_some_and(|s| !s.allows(candidate.engine.address)) {
            Some(Excluded::Subset)
        } else if !serves(candidate) {
            Some(Excluded::Model)
        } else if candidate.closed == Some("asleep") {
            Some(Excluded::Asleep)
        } else if candidate.closed.is_some() {
            Some(Excluded::Draining)
        } else if candidate.health.is_nan() || candidate.health < MIN_HEALTH {
            Some(Excluded::Health)
        } else {
            None
        };
        match why {
            Some(why) => excluded.push((at, why)),
            None => left.push(at),
        }
    }
    let silent = |at: &usize| candidates[*at].state == Some(crate::pool::State::Silent);
    let mut reason = "best";
    if left.iter().all(silent) {
        if !left.is_empty() {
            reason = "only silent engines are left";
        }
    } else {
        excluded.extend(left.iter().copied().filter(|at| silent(at)).map(|at| (at, Excluded::Silent)));
        left.retain(|at| !silent(at));
    }
    let full = |at: &usize| candidates[*at].queue >= policy.max_queue;
    let shortest = left.iter().map(|at| candidates[*at].queue).min().unwrap_or(0);
    if left.iter().all(full) {
        // Everybody is full: those near the shortest queue are judged all the same, and cache decides.
        let bound = shortest.saturating_add(policy.max_queue);
        excluded.extend(
            left.iter().copied().filter(|at| candidates[*at].queue > bound).map(|at| (at, Excluded::QueueFull)),
        );
        left.retain(|at| candidates[*at].queue <= bound);
        if !left.is_empty() {
            reason = "all queues are full";
        }
    } else {
        excluded.extend(left.iter().copied().filter(full).map(|at| (at, Excluded::QueueFull)));
        left.retain(|at| !full(at));
    }
    if left.len() == 1 && candidates.len() > 1 && reason == "best" {
        reason = "only one is eligible";
    }
    rank(policy, asked, candidates, left, excluded, reason, seed)
}

fn rank(
    policy: &Policy,
    asked: &Asked,
    candidates: &[Candidate],
    left: Vec<usize>,
    excluded: Vec<(usize, Excluded)>,
    reason: &'static str,
    seed: u64,
) -> Pick {
    let count = left.len().max(1) as f64;
    let view = View {
        best_cache: left.iter().map(|at| candidates[*at].cache()).fold(0.0, f64::max),
        mean_queue: left.iter().map(|at| f64::from(candidates[*at].queue)).sum::<f64>() / count,
        max_queue: policy.max_queue,
    };
    let mut ranked: Vec<Ranked> = left
        .into_iter()
        .map(|at| {
            let scored = policy.factors.score(asked, &candidates[at], &view);
            let rank = match policy.profile {
                Profile::FiveFactor => scored.score,
                Profile::LeastWork => work(policy, asked, &candidates[at], &view),
            };
            Ranked { at, rank, scored }
        })
        .collect();
    // Greater is better for a score, less for a cost.
    let sign = if policy.profile == Profile::LeastWork { -1.0 } else { 1.0 };
    ranked.sort_by(|a, b| (sign * b.rank).total_cmp(&(sign * a.rank)));
    let Some(top) = ranked.first().map(|r| sign * r.rank) else {
        return Pick { chosen: None, best: None, ranked, excluded, reason: "nobody is eligible" };
    };
    let equal = ranked.iter().take_while(|r| top - sign * r.rank <= EQUAL * top.abs().max(1.0)).count();
    let (best, reason) = match first_of(candidates, ranked[..equal].iter().map(|r| r.at), seed) {
        Some((at, why)) if equal > 1 && reason == "best" => (at, why),
        Some((at, _)) => (at, reason),
        None => (ranked[0].at, reason),
    };
    if let Some(place) = ranked.iter().position(|r| r.at == best) {
        ranked[..=place].rotate_right(1);
    }
    let (chosen, reason) = match policy.mode {
        Mode::Route => (best, reason),
        Mode::Observe => (fewest(candidates, &ranked, seed).unwrap_or(best), "observing: fewest requests"),
    };
    Pick { chosen: Some(chosen), best: Some(best), ranked, excluded, reason }
}

/// Tokens of work before this request's first token on that engine.
fn work(policy: &Policy, asked: &Asked, candidate: &Candidate, view: &View) -> f64 {
    let uncached = asked.prompt_tokens.saturating_sub(candidate.cached_tokens as usize) as f64;
    candidate.backlog_tokens as f64 + uncached * (1.0 + policy.crowding * view.mean_queue)
}

/// Of equals: the least load, then the shortest queue, then one by lot.
fn first_of(candidates: &[Candidate], equals: impl Iterator<Item = usize>, seed: u64) -> Option<(usize, &'static str)> {
    let mut equals: Vec<usize> = equals.collect();
    let load = equals.iter().map(|at| candidates[*at].load_or_neutral()).fold(f64::INFINITY, f64::min);
    let before = equals.len();
    equals.retain(|at| candidates[*at].load_or_neutral() - load <= EQUAL);
    if let [one] = equals[..] {
        return Some((one, if before > 1 { "equal score, least load" } else { "best" }));
    }
    let queue = equals.iter().map(|at| candidates[*at].queue).min()?;
    equals.retain(|at| candidates[*at].queue == queue);
    if let [one] = equals[..] {
        return Some((one, "equal score and load, shortest queue"));
    }
    Some((*equals.get((mix(seed) % equals.len() as u64) as usize)?, "equal in all, by lot"))
}

/// The fewest requests, running, waiting and coming.
fn fewest(candidates: &[Candidate], ranked: &[Ranked], seed: u64) -> Option<usize> {
    let requests = |at: usize| u64::from(candidates[at].running) + u64::from(candidates[at].queue);
    let least = ranked.iter().map(|r| requests(r.at)).min()?;
    let equals: Vec<usize> = ranked.iter().map(|r| r.at).filter(|at| requests(*at) == least).collect();
    equals.get((mix(seed) % equals.len().max(1) as u64) as usize).copied()
}

/// SplitMix64's finalizer: spreads seeds that differ little.
fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
#[path = "pick_tests.rs"]
mod tests;
