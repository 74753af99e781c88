//! What this picker has placed and not yet seen end.
//!
//! A placement is *coming* until the engine says that it arrived; then the engine's own queue counts it. It leaves when
//! the engine says finished, when the picker takes it back (the client left before the answer was whole), or by age.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// Placements kept. At 1,000 requests a second and a minute each, 60,000 are in flight; 200 bytes each.
pub const MAX_PLACEMENTS: usize = 1 << 16;
/// A placement that has not arrived this long after the pick never will: the body was whole when it was made.
pub const COMING_MS: u64 = 10_000;
/// Where nobody reports arrivals, a placement counts in the queue this long.
pub const RECENT_MS: u64 = 2_000;
/// An arrived placement that is never said to have finished is forgotten after this long.
pub const LOST_MS: u64 = 3_600_000;

/// A request's id as a number: the UUID's 128 bits.
pub type Id = u128;

#[derive(Debug)]
struct Placement {
    engine: Arc<str>,
    tokens: u32,
    at_ms: u64,
    arrived: bool,
}

/// Sums over one engine's placements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Placed, not yet arrived.
    pub coming: u32,
    /// Tokens to prefill of those.
    pub coming_tokens: u64,
    /// Placed, not yet ended.
    pub in_flight: u32,
}

#[derive(Debug, Default)]
struct Engine {
    counts: Counts,
    /// Times of the placements of the last [`RECENT_MS`] that were not taken back.
    recent: VecDeque<(u64, Id)>,
}

/// All placements of this picker. Times are milliseconds of one steady clock of the caller.
#[derive(Debug, Default)]
pub struct Ledger {
    placements: HashMap<Id, Placement>,
    engines: HashMap<Arc<str>, Engine>,
    /// Oldest first; ids that have ended since are skipped.
    order: VecDeque<(u64, Id)>,
}

impl Ledger {
    /// Notes a placement. `tokens`: what the engine will have to prefill. Gives the ids that had to be forgotten for
    /// want of room.
    pub fn place(&mut self, id: Id, engine: &Arc<str>, tokens: u32, now_ms: u64) -> Vec<Id> {
        if self.placements.contains_key(&id) {
            return Vec::new();
        }
        let mut forgotten = Vec::new();
        while self.placements.len() >= MAX_PLACEMENTS {
            let Some((_, oldest)) = self.order.pop_front() else { break };
            if self.end(oldest) {
                forgotten.push(oldest);
            }
        }
        let of = self.engines.entry(Arc::clone(engine)).or_default();
        of.counts.coming += 1;
        of.counts.coming_tokens += u64::from(tokens);
        of.counts.in_flight += 1;
        of.recent.push_back((now_ms, id));
        trim(&mut of.recent, now_ms);
        self.placements.insert(id, Placement { engine: Arc::clone(engine), tokens, at_ms: now_ms, arrived: false });
        self.order.push_back((now_ms, id));
        forgotten
    }

    /// The engine has it in its own queue now.
    pub fn arrived(&mut self, id: Id) {
        let Some(placement) = self.placements.get_mut(&id) else { return };
        if !placement.arrived {
            placement.arrived = true;
            if let Some(of) = self.engines.get_mut(&placement.engine) {
                of.counts.coming -= 1;
                of.counts.coming_tokens -= u64::from(placement.tokens);
            }
        }
    }

    /// It ended, or never was: whatever is counted for it is taken back, once. Says whether something was.
    pub fn end(&mut self, id: Id) -> bool {
        let Some(placement) = self.placements.remove(&id) else { return false };
        // The counts of the engine that was incremented, whatever has become of that engine meanwhile.
        if let Some(of) = self.engines.get_mut(&placement.engine) {
            of.counts.in_flight -= 1;
            if !placement.arrived {
                of.counts.coming -= 1;
                of.counts.coming_tokens -= u64::from(placement.tokens);
            }
            of.recent.retain(|(_, recent)| *recent != id);
            if of.counts.in_flight == 0 && of.recent.is_empty() {
                self.engines.remove(&placement.engine);
            }
        }
        true
    }

    /// Forgets what is too old, and gives the ids that never arrived: others may have to be told.
    pub fn expire(&mut self, now_ms: u64) -> Vec<Id> {
        let mut never_arrived = Vec::new();
        let mut keep = VecDeque::new();
        while let Some(&(at_ms, id)) = self.order.front() {
            if at_ms + COMING_MS > now_ms {
                break;
            }
            self.order.pop_front();
            match self.placements.get(&id) {
                Some(placement) if placement.at_ms != at_ms => {}
                Some(placement) if placement.arrived && at_ms + LOST_MS > now_ms => keep.push_back((at_ms, id)),
                Some(placement) => {
                    if !placement.arrived {
                        never_arrived.push(id);
                    }
                    self.end(id);
                }
                None => {}
            }
        }
        // Those kept are older than all that are left: they go back to the front in their order.
        while let Some(kept) = keep.pop_back() {
            self.order.push_front(kept);
        }
        never_arrived
    }

    /// Sums for one engine.
    pub fn counts(&self, engine: &str) -> Counts {
        self.engines.get(engine).map(|of| of.counts).unwrap_or_default()
    }

    /// Placements of the last [`RECENT_MS`], for engines whose arrivals nobody reports.
    pub fn recent(&mut self, engine: &str, now_ms: u64) -> u32 {
        self.engines.get_mut(engine).map_or(0, |of| {
            trim(&mut of.recent, now_ms);
            of.recent.len() as u32
        })
    }

    /// Placements in flight over all engines.
    pub fn len(&self) -> usize {
        self.placements.len()
    }

    /// Whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.placements.is_empty()
    }

    /// Engines that placements are counted for: equal to a count over all of them, which tests check.
    pub fn engines(&self) -> HashSet<Arc<str>> {
        self.engines.iter().filter(|(_, of)| of.counts.in_flight > 0).map(|(id, _)| Arc::clone(id)).collect()
    }
}

fn trim(recent: &mut VecDeque<(u64, Id)>, now_ms: u64) {
    while recent.front().is_some_and(|(at_ms, _)| at_ms + RECENT_MS <= now_ms) {
        recent.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(name: &str) -> Arc<str> {
        name.into()
    }

    #[test]
    fn a_life_is_counted_once_each_way() {
        let mut ledger = Ledger::default();
        ledger.place(1, &engine("a.0"), 100, 0);
        ledger.place(1, &engine("b.0"), 100, 0);
        assert_eq!(ledger.counts("a.0"), Counts { coming: 1, coming_tokens: 100, in_flight: 1 });
        assert_eq!(ledger.counts("b.0"), Counts::default());
        ledger.arrived(1);
        ledger.arrived(1);
        assert_eq!(ledger.counts("a.0"), Counts { coming: 0, coming_tokens: 0, in_flight: 1 });
        assert!(ledger.end(1));
        assert!(!ledger.end(1));
        assert_eq!(ledger.counts("a.0"), Counts::default());
        assert!(ledger.is_empty() && ledger.engines().is_empty());
    }

    #[test]
    fn what_never_arrives_is_forgotten_and_told() {
        let mut ledger = Ledger::default();
        ledger.place(1, &engine("a.0"), 1, 0);
        ledger.place(2, &engine("a.0"), 1, 0);
        ledger.arrived(2);
        assert_eq!(ledger.expire(COMING_MS - 1), []);
        assert_eq!(ledger.expire(COMING_MS), [1]);
        assert_eq!(ledger.counts("a.0").in_flight, 1);
        assert_eq!(ledger.expire(LOST_MS), []);
        assert!(ledger.is_empty());
    }

    #[test]
    fn recent_placements_age_and_are_taken_back() {
        let mut ledger = Ledger::default();
        let a = engine("a.0");
        ledger.place(1, &a, 1, 0);
        ledger.place(2, &a, 1, 1000);
        assert_eq!(ledger.recent("a.0", 1000), 2);
        assert_eq!(ledger.recent("a.0", RECENT_MS), 1);
        ledger.end(2);
        assert_eq!(ledger.recent("a.0", RECENT_MS), 0);
        assert_eq!(ledger.recent("b.0", 0), 0);
    }

    #[test]
    fn a_full_ledger_forgets_the_oldest() {
        let mut ledger = Ledger::default();
        let a = engine("a.0");
        for id in 0..MAX_PLACEMENTS as u128 {
            assert_eq!(ledger.place(id, &a, 1, 0), []);
        }
        assert_eq!(ledger.place(u128::MAX, &a, 1, 1), [0]);
        assert_eq!(ledger.len(), MAX_PLACEMENTS);
        assert_eq!(ledger.counts("a.0").coming as usize, MAX_PLACEMENTS);
    }

    /// Against a list of placements, with a generator whose seed is shown.
    #[test]
    fn counts_equal_those_of_a_list() {
        for seed in 0..20u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut next = move |bound: u64| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state % bound
            };
            let names = [engine("a.0"), engine("b.0"), engine("c.0")];
            let (mut ledger, mut list) = (Ledger::default(), HashMap::<Id, (usize, u32, u64, bool)>::new());
            let mut now = 0;
            for _ in 0..2000 {
                now += next(200);
                let id = Id::from(next(60));
                match next(5) {
                    0 | 1 => {
                        let (of, tokens) = (next(3) as usize, next(1000) as u32);
                        ledger.place(id, &names[of], tokens, now);
                        list.entry(id).or_insert((of, tokens, now, false));
                    }
                    2 => {
                        ledger.arrived(id);
                        list.entry(id).and_modify(|p| p.3 = true);
                    }
                    3 => assert_eq!(ledger.end(id), list.remove(&id).is_some(), "seed {seed}"),
                    _ => {
                        ledger.expire(now);
                        list.retain(|_, p| now < p.2 + if p.3 { LOST_MS } else { COMING_MS });
                    }
                }
                for (of, name) in names.iter().enumerate() {
                    let mine = || list.values().filter(move |p| p.0 == of);
                    let want = Counts {
                        coming: mine().filter(|p| !p.3).count() as u32,
                        coming_tokens: mine().filter(|p| !p.3).map(|p| u64::from(p.1)).sum(),
                        in_flight: mine().count() as u32,
                    };
                    assert_eq!(ledger.counts(name), want, "seed {seed}");
                }
            }
        }
    }
}
