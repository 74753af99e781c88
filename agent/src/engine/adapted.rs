//! What the engine's thread tells of adapters, and of sleep and drain.

use super::Engine;
use crate::adapters::Doing;
use crate::requests::adapter_name;
use std::sync::atomic::Ordering;

impl Engine {
    /// How many live requests have an adapter: while there are none, [`Engine::runs`] and [`Engine::ran`] need not be
    /// called.
    pub fn adapted(&self) -> usize {
        self.adapted
    }

    /// The step that was just scheduled runs this request.
    pub fn runs(&mut self, id: &str) {
        if let Some((live, _)) = self.requests.get(id)
            && live.adapter != 0
            && !self.running.contains(&live.adapter)
        {
            self.running.push(live.adapter);
        }
    }

    /// All requests of the step were told to [`Engine::runs`]. Steps with the adapters of the step before change
    /// nothing, and neither do those without.
    pub fn ran(&mut self) {
        let same = self.running.len() == self.ran.len() && self.running.iter().all(|one| self.ran.contains(one));
        if !same && !self.running.is_empty() {
            std::mem::swap(&mut self.running, &mut self.ran);
            let adapters = self.requests.adapters();
            if !self.pen.ran(self.ran.iter().map(|number| adapter_name(adapters, *number))) {
                self.gauges.fault();
            }
        }
        self.running.clear();
    }

    /// The engine did something with an adapter outside of a step.
    pub fn adapter_done(&mut self, doing: Doing, adapter: &str) {
        self.ran.clear(); // the next step uses its adapters after this
        if !self.pen.adapter(doing, adapter) {
            self.gauges.fault();
        }
    }

    /// The engine sleeps now, or does not any more. Told at once.
    pub fn asleep(&mut self, asleep: bool) {
        self.gauges.asleep.store(asleep, Ordering::Relaxed);
        (self.wake)();
    }

    /// The engine takes no new requests now, or takes them again. Told at once.
    pub fn draining(&mut self, draining: bool) {
        self.gauges.draining.store(draining, Ordering::Relaxed);
        (self.wake)();
    }
}
