//! What the engine's thread tells of adapters, and of sleep and drain.

use super::Engine;
use crate::adapters::Doing;
use crate::record::Pen;
use crate::requests::adapter_name;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;

/// Most doings with adapters that wait for room in the ring. Operators load adapters by hand or by the minute.
const MAX_DOINGS: usize = 256;

/// Which adapters are in use. Told as a whole when it changes, so that nothing is amiss once there is room in the ring.
#[derive(Debug, Default)]
pub(super) struct Using {
    // By adapter number: how many live requests were not scheduled yet, and how many were. None of both is none.
    requests: BTreeMap<u32, [usize; 2]>,
    stale: bool,
    doings: VecDeque<(Doing, String)>,
    // Numbers of the adapters that the last step ran, as told, and that this one runs: as many as the engine has slots
    // for.
    ran: Vec<u32>,
    running: Vec<u32>,
}

impl Using {
    fn change(&mut self, adapter: u32, from: Option<usize>, to: Option<usize>) {
        if adapter == 0 {
            return;
        }
        let counts = self.requests.entry(adapter).or_default();
        if let Some(count) = from.and_then(|from| counts.get_mut(from)) {
            *count = count.saturating_sub(1);
            self.stale |= *count == 0;
        }
        if let Some(count) = to.and_then(|to| counts.get_mut(to)) {
            *count += 1;
            self.stale |= *count == 1;
        }
        if *counts == [0, 0] {
            self.requests.remove(&adapter);
        }
    }

    /// A request with this adapter, 0 for none, became live.
    pub(super) fn waits(&mut self, adapter: u32) {
        self.change(adapter, None, Some(0));
    }

    /// It was scheduled for the first time.
    pub(super) fn starts(&mut self, adapter: u32) {
        self.change(adapter, Some(0), Some(1));
    }

    /// It is live no more.
    pub(super) fn leaves(&mut self, adapter: u32, started: bool) {
        self.change(adapter, Some(usize::from(started)), None);
    }

    /// Is something to be told?
    pub(super) fn owes(&self) -> bool {
        self.stale || !self.doings.is_empty()
    }

    /// Tells it, as far as there is room.
    pub(super) fn settle(&mut self, pen: &mut Pen, adapters: &[String]) {
        while let Some((doing, adapter)) = self.doings.front() {
            if !pen.adapter(*doing, adapter) {
                return;
            }
            self.doings.pop_front();
        }
        if self.stale {
            let of = |place: usize| {
                let some = self.requests.iter().filter(move |(_, counts)| counts[place] > 0);
                some.map(|(number, _)| adapter_name(adapters, *number)).take(proto::event::MAX_LIST)
            };
            self.stale = !pen.used(of(1), of(0));
        }
    }
}

impl Engine {
    /// Has a live request an adapter? While there is none, [`Engine::runs`] and [`Engine::ran`] need not be called.
    pub fn adapted(&self) -> bool {
        !self.using.requests.is_empty()
    }

    /// The step that was just scheduled runs this request.
    pub fn runs(&mut self, id: &str) {
        let running = &mut self.using.running;
        if let Some((live, _)) = self.requests.get(id)
            && live.adapter != 0
            && !running.contains(&live.adapter)
        {
            running.push(live.adapter);
        }
    }

    /// All requests of the step were told to [`Engine::runs`]. Steps with the adapters of the step before change
    /// nothing, and neither do those without.
    pub fn ran(&mut self) {
        let Using { ran, running, doings, .. } = &mut self.using;
        let same = running.len() == ran.len() && running.iter().all(|one| ran.contains(one));
        if !same && !running.is_empty() {
            std::mem::swap(running, ran);
            let adapters = self.requests.adapters();
            // What was done before is told before; without room, the next step tells its adapters in any case.
            let names = ran.iter().map(|number| adapter_name(adapters, *number));
            if !doings.is_empty() || !self.pen.ran(names) {
                ran.clear();
            }
        }
        running.clear();
    }

    /// The engine did something with an adapter outside of a step.
    pub fn adapter_done(&mut self, doing: Doing, adapter: &str) {
        let using = &mut self.using;
        using.ran.clear(); // the next step uses its adapters after this
        if using.doings.len() < MAX_DOINGS {
            using.doings.push_back((doing, adapter.to_string()));
        } else {
            self.gauges.fault();
        }
        self.tell();
    }

    /// The engine sleeps now, or does not any more. Told at once.
    pub fn asleep(&mut self, asleep: bool) {
        self.gauges.asleep.store(asleep, Ordering::Relaxed);
        self.ring();
    }

    /// The engine takes no new requests now, or takes them again. Told at once.
    pub fn draining(&mut self, draining: bool) {
        self.gauges.draining.store(draining, Ordering::Relaxed);
        self.ring();
    }
}
