//! The numbers of a run, and what must hold of them.

use crate::decision::Class;
use serde::Serialize;

/// The last line of `cargo demo --check`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// Engines that ran.
    pub engines: u64,
    /// Requests of the sequential phase.
    pub requests: u64,
    /// Of these, turns that follow another turn of their chat.
    pub follow_up_turns: u64,
    /// Of these, those that went to the engine of the turn before.
    pub follow_ups_to_holder: u64,
    /// Sequential phase: what the picker predicted that its choices would take from cache.
    pub predicted_cached_tokens: u64,
    /// Sequential phase: what the engines took from cache, as their agents report.
    pub delivered_cached_tokens: u64,
    /// Sequential phase: the same as vLLM tells the client.
    pub usage_cached_tokens: u64,
    /// Concurrent phase, in which the index is killed and started again: requests by class.
    pub exact: u64,
    /// See [`Class::Raced`].
    pub raced: u64,
    /// See [`Class::Wrong`].
    pub wrong: u64,
    /// See [`Class::Unknown`].
    pub unknown: u64,
    /// Requests of both phases that were not answered with 200.
    pub failed_requests: u64,
    /// At rest: blocks by which the index's sets differ from the engines' own pools.
    pub wrong_blocks: u64,
    /// At rest: cached blocks whose tokens the agents do not know.
    pub unnamed: u64,
    /// From the end of an engine step until the index answers with its blocks, milliseconds.
    pub staleness_ms_p50: f64,
    /// The same, 99th percentile.
    pub staleness_ms_p99: f64,
    /// From the new index's start until it is in step with both engines, milliseconds.
    pub index_restart_ms: f64,
    /// From the end of a request's body until the picker's verdict, microseconds.
    pub decision_us_p50: f64,
    /// The same, 99th percentile.
    pub decision_us_p99: f64,
}

impl Report {
    /// Counts one request of the concurrent phase.
    pub fn count(&mut self, class: Class) {
        match class {
            Class::Exact => self.exact += 1,
            Class::Raced => self.raced += 1,
            Class::Wrong => self.wrong += 1,
            Class::Unknown => self.unknown += 1,
        }
    }

    /// Every condition that does not hold, worded for a person. Times are not judged.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut must = |holds: bool, fault: String| {
            if !holds {
                faults.push(fault);
            }
        };
        must(self.engines == 2, format!("{} engines ran, not 2", self.engines));
        must(self.follow_up_turns > 0, "no turn followed another".into());
        must(
            self.follow_ups_to_holder == self.follow_up_turns,
            format!("{} of {} follow-up turns went to the holder", self.follow_ups_to_holder, self.follow_up_turns),
        );
        let (predicted, delivered, usage) =
            (self.predicted_cached_tokens, self.delivered_cached_tokens, self.usage_cached_tokens);
        must(delivered > 0, "nothing was taken from cache".into());
        must(predicted == delivered, format!("{predicted} cached tokens were predicted, {delivered} delivered"));
        must(usage == delivered, format!("{delivered} cached tokens were delivered, {usage} by vLLM's usage field"));
        must(self.exact > 0, "no request of the concurrent phase was predicted exactly".into());
        must(self.wrong == 0, format!("{} requests are wrong: an agent's own prediction was not met", self.wrong));
        must(self.failed_requests == 0, format!("{} requests failed", self.failed_requests));
        must(self.wrong_blocks == 0, format!("{} blocks differ between index and engines", self.wrong_blocks));
        must(self.unnamed == 0, format!("{} cached blocks are unnamed", self.unnamed));
        faults
    }
}

/// The value below which `share` (0 to 1) of the samples lie, by nearest rank; 0 when there are none.
pub fn percentile(samples: &mut [f64], share: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    let rank = (share * samples.len() as f64).ceil() as usize;
    samples.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Report {
        Report {
            engines: 2,
            requests: 9,
            follow_up_turns: 6,
            follow_ups_to_holder: 6,
            predicted_cached_tokens: 64,
            delivered_cached_tokens: 64,
            usage_cached_tokens: 64,
            exact: 3,
            raced: 1,
            unknown: 2,
            ..Report::default()
        }
    }

    #[test]
    fn each_condition_is_judged() {
        assert_eq!(good().faults(), Vec::<String>::new());
        let bad: [fn(&mut Report); 9] = [
            |r| r.engines = 1,
            |r| r.follow_ups_to_holder -= 1,
            |r| r.predicted_cached_tokens += 32,
            |r| r.usage_cached_tokens -= 32,
            |r| r.exact = 0,
            |r| r.wrong = 1,
            |r| r.failed_requests = 1,
            |r| r.wrong_blocks = 1,
            |r| r.unnamed = 1,
        ];
        for (number, spoil) in bad.iter().enumerate() {
            let mut report = good();
            spoil(&mut report);
            assert_eq!(report.faults().len(), 1, "condition {number}: {:?}", report.faults());
        }
    }

    #[test]
    fn percentiles_are_of_the_samples() {
        let mut samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(percentile(&mut samples, 0.5), 50.0);
        assert_eq!(percentile(&mut samples, 0.99), 99.0);
        assert_eq!(percentile(&mut [], 0.5), 0.0);
        assert_eq!(percentile(&mut [4.0], 0.99), 4.0);
    }
}
