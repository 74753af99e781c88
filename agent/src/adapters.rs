//! Which LoRA adapters an engine has at hand, mirrored from what it was asked to run.
//!
//! The engine's own lists live in its workers, and asking them would hold the engine up. But they follow from what the
//! engine's core does, in order, and that is told here: vLLM keeps an LRU of `max_loras` adapters in GPU slots inside an
//! LRU of `max_cpu_loras` in the host's memory (`LRUCacheWorkerLoRAManager`, the same in 0.10.2 to 0.33). A step that
//! runs an adapter loads it into both, or makes it the latest of both; who must go is the one that was used longest ago
//! and is not pinned; one that leaves the host's memory leaves its slot too.
//!
//! Adapters of one step are used in the order of a Python set, which differs between processes; here it is the order in
//! which they are told. What is loaded after the step is the same in every order. Which of two adapters that were last
//! used by one step goes first is a guess.

/// What the engine was told to do with one adapter outside of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// Load it, unless it is loaded: `add_lora`.
    Add,
    /// Load it anew in place of itself: `add_lora` with `load_inplace`.
    Reload,
    /// Forget it: `remove_lora`.
    Remove,
    /// Keep it for good: `pin_lora`.
    Pin,
}

/// Adapters by where they are, each list sorted, without doubles, of at most [`proto::event::MAX_LIST`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lists {
    /// In a GPU slot.
    pub loaded: Vec<String>,
    /// Of requests that run.
    pub running: Vec<String>,
    /// Of requests that wait.
    pub waiting: Vec<String>,
    /// In the host's memory and in no slot.
    pub cached: Vec<String>,
}

/// An LRU of adapters: the one used longest ago comes first. Bounded by its size, some hundreds at most, so it is
/// searched from end to end.
#[derive(Debug, Default)]
struct Order {
    size: usize,
    // Name, and is it pinned?
    seats: Vec<(String, bool)>,
}

impl Order {
    fn at(&self, name: &str) -> Option<usize> {
        self.seats.iter().position(|seat| seat.0 == name)
    }

    fn touch(&mut self, at: usize) {
        self.seats[at..].rotate_left(1);
    }

    fn remove(&mut self, name: &str) -> bool {
        self.at(name).map(|at| self.seats.remove(at)).is_some()
    }

    /// Makes room for one more. `None`: all are pinned and nothing may go; the name of who went otherwise, if any.
    fn room(&mut self) -> Option<Option<String>> {
        if self.seats.len() < self.size {
            return Some(None);
        }
        let oldest = self.seats.iter().position(|seat| !seat.1)?;
        Some(Some(self.seats.remove(oldest).0))
    }
}

/// The adapters of one engine.
#[derive(Debug, Default)]
pub struct Adapters {
    slots: Order,
    host: Order,
    lists: Lists,
    stale: bool,
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort_unstable();
    names.dedup();
    names.truncate(proto::event::MAX_LIST);
    names
}

impl Adapters {
    /// `slots` adapters fit on the GPU (0: no LoRA), `host` into the host's memory, those of the slots among them.
    pub fn new(slots: usize, host: usize) -> Self {
        let order = |size| Order { size, seats: Vec::new() };
        Self { slots: order(slots), host: order(host.max(slots)), ..Self::default() }
    }

    /// Requests of these adapters run, and of these wait.
    pub fn used(&mut self, running: Vec<String>, waiting: Vec<String>) {
        (self.lists.running, self.lists.waiting) = (sorted(running), sorted(waiting));
    }

    /// A step ran requests of these adapters. A step of none need not be told, nor one that has those of the step
    /// before it.
    pub fn ran<'a>(&mut self, adapters: impl Iterator<Item = &'a str>) {
        adapters.for_each(|adapter| self.load(adapter));
    }

    /// The engine did something with one adapter.
    pub fn done(&mut self, doing: Doing, adapter: &str) {
        match doing {
            Doing::Add => self.load(adapter),
            Doing::Reload => {
                self.remove(adapter);
                self.load(adapter);
            }
            Doing::Remove => self.remove(adapter),
            Doing::Pin => {
                // The engine raises when the host's memory does not have it.
                let Some(at) = self.host.at(adapter) else { return };
                self.host.seats[at].1 = true;
                if self.slots.at(adapter).is_none() {
                    self.activate(adapter);
                }
                if let Some(at) = self.slots.at(adapter) {
                    self.slots.seats[at].1 = true;
                }
            }
        }
    }

    /// The lists, as of the last [`Adapters::refresh`].
    pub fn lists(&self) -> &Lists {
        &self.lists
    }

    /// Makes the lists anew if one of them changed, which is seldom.
    pub fn refresh(&mut self) {
        if std::mem::take(&mut self.stale) {
            let cached = self.host.seats.iter().filter(|seat| self.slots.at(&seat.0).is_none());
            self.lists.cached = sorted(cached.map(|seat| seat.0.clone()).collect());
            self.lists.loaded = sorted(self.slots.seats.iter().map(|seat| seat.0.clone()).collect());
        }
    }

    /// `LRUCacheWorkerLoRAManager.add_adapter`.
    fn load(&mut self, adapter: &str) {
        if self.slots.size == 0 {
            return;
        }
        match self.host.at(adapter) {
            Some(at) => self.host.touch(at),
            None => {
                let Some(gone) = self.host.room() else { return };
                if let Some(gone) = gone {
                    self.slots.remove(&gone);
                }
                self.host.seats.push((adapter.to_string(), false));
                self.stale = true;
            }
        }
        self.activate(adapter);
    }

    /// `LRUCacheLoRAModelManager.activate_adapter`.
    fn activate(&mut self, adapter: &str) {
        match self.slots.at(adapter) {
            Some(at) => self.slots.touch(at),
            None if self.slots.room().is_some() => {
                self.slots.seats.push((adapter.to_string(), false));
                self.stale = true;
                // The engine reads it from the host's memory, which makes it the latest there.
                if let Some(at) = self.host.at(adapter) {
                    self.host.touch(at);
                }
            }
            None => {}
        }
    }

    fn remove(&mut self, adapter: &str) {
        self.stale |= self.slots.remove(adapter) | self.host.remove(adapter);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_string()).collect()
    }

    fn lists(adapters: &mut Adapters) -> &Lists {
        adapters.refresh();
        adapters.lists()
    }

    fn at_hand(adapters: &mut Adapters) -> (Vec<String>, Vec<String>) {
        let lists = lists(adapters);
        (lists.loaded.clone(), lists.cached.clone())
    }

    #[test]
    fn the_least_recently_used_goes_to_the_hosts_memory_and_then_away() {
        let mut all = Adapters::new(2, 3);
        for adapter in ["a", "b", "a", "c"] {
            all.ran([adapter].into_iter());
        }
        assert_eq!(at_hand(&mut all), (names(&["a", "c"]), names(&["b"])));
        all.ran(["d"].into_iter());
        assert_eq!(at_hand(&mut all), (names(&["c", "d"]), names(&["a"])), "b left the host's memory");
        all.ran(["a", "d"].into_iter());
        assert_eq!(at_hand(&mut all), (names(&["a", "d"]), names(&["c"])));
    }

    #[test]
    fn pinned_ones_stay_and_removed_ones_go() {
        let mut all = Adapters::new(2, 2);
        all.done(Doing::Pin, "nobody");
        all.ran(["a"].into_iter());
        all.done(Doing::Pin, "a");
        for adapter in ["b", "c", "d"] {
            all.ran([adapter].into_iter());
        }
        assert_eq!(at_hand(&mut all), (names(&["a", "d"]), names(&[])));
        all.done(Doing::Pin, "d");
        all.ran(["e"].into_iter());
        assert_eq!(at_hand(&mut all), (names(&["a", "d"]), names(&[])), "all are pinned: nothing can be loaded");
        all.done(Doing::Remove, "a");
        all.done(Doing::Add, "e");
        assert_eq!(at_hand(&mut all), (names(&["d", "e"]), names(&[])));
        all.done(Doing::Reload, "d");
        all.ran(["f"].into_iter());
        all.ran(["g"].into_iter());
        assert_eq!(at_hand(&mut all), (names(&["f", "g"]), names(&[])), "what is loaded anew is pinned no more");
    }

    #[test]
    fn lists_are_made_anew_only_when_they_changed() {
        let mut all = Adapters::new(2, 2);
        all.ran(["b", "a"].into_iter());
        let before = lists(&mut all).loaded.as_ptr();
        all.ran(["a"].into_iter());
        all.used(names(&["b", "a"]), names(&["b"]));
        let last = lists(&mut all);
        assert_eq!(last.loaded.as_ptr(), before, "nothing that it shows has changed");
        assert_eq!(
            (&last.running, &last.waiting, &last.loaded),
            (&names(&["a", "b"]), &names(&["b"]), &names(&["a", "b"]))
        );
    }

    /// vLLM's managers, written down as they are: two ordered maps with pins, as lists of names and sets.
    #[derive(Default)]
    struct Vllm {
        registered: Vec<String>,
        active: Vec<String>,
        pinned_registered: Vec<String>,
        pinned_active: Vec<String>,
    }

    impl Vllm {
        fn add(&mut self, slots: usize, host: usize, name: &str) -> Option<()> {
            if self.registered.iter().any(|r| r == name) {
                self.registered.retain(|r| r != name);
                self.registered.push(name.into());
            } else {
                if self.registered.len() + 1 > host {
                    let gone = self.registered.iter().find(|r| !self.pinned_registered.contains(r))?.clone();
                    self.forget(&gone);
                }
                self.registered.push(name.into());
            }
            self.activate(slots, name)
        }

        fn activate(&mut self, slots: usize, name: &str) -> Option<()> {
            let there = self.active.iter().any(|r| r == name);
            if !there && self.active.len() >= slots {
                let gone = self.active.iter().find(|r| !self.pinned_active.contains(r))?.clone();
                self.active.retain(|r| *r != gone);
            }
            self.active.retain(|r| r != name);
            self.active.push(name.into());
            if !there {
                self.registered.retain(|r| r != name);
                self.registered.push(name.into());
            }
            Some(())
        }

        fn forget(&mut self, name: &str) {
            for list in [&mut self.registered, &mut self.active, &mut self.pinned_registered, &mut self.pinned_active] {
                list.retain(|r| r != name);
            }
        }
    }

    #[test]
    fn random_steps_agree_with_the_engines_lru() {
        for seed in 0..200u64 {
            let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut next = |below: u64| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % below
            };
            let slots = 1 + next(4) as usize;
            let host = slots + next(4) as usize;
            let (mut mirror, mut engine) = (Adapters::new(slots, host), Vllm::default());
            for at in 0..300 {
                let name = format!("l{}", next(9));
                match next(20) {
                    0 => {
                        mirror.done(Doing::Remove, &name);
                        engine.forget(&name);
                    }
                    1 => {
                        mirror.done(Doing::Reload, &name);
                        engine.forget(&name);
                        engine.add(slots, host, &name);
                    }
                    2 if engine.pinned_registered.len() + 1 < slots => {
                        mirror.done(Doing::Pin, &name);
                        if engine.registered.contains(&name) {
                            engine.pinned_registered.push(name.clone());
                            if !engine.active.contains(&name) {
                                engine.activate(slots, &name);
                            }
                            engine.pinned_active.push(name.clone());
                        }
                    }
                    _ => {
                        mirror.ran([&*name].into_iter());
                        engine.add(slots, host, &name);
                    }
                }
                let sorted = |mut names: Vec<String>| {
                    names.sort();
                    names
                };
                let cached = engine.registered.iter().filter(|r| !engine.active.contains(r)).cloned().collect();
                let should = (sorted(engine.active.clone()), sorted(cached));
                assert_eq!(at_hand(&mut mirror), should, "seed {seed}, step {at}");
            }
        }
    }
}
