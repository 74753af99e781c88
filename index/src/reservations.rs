//! Placements that pickers told of and engines have not finished: in-flight load and coming blocks.
//!
//! A placement's load counts until the engine says that the request arrived (from then on the engine's own queue
//! counts it); its coming blocks count until the engine took them into its sets, which is at the latest when the
//! request ends. All of it ends when the picker releases it, with the engine's epoch, and after [`LONGEST_MS`].

use crate::answer::{MAX_FINGERPRINTS, NotReserved, Placement, Reserved};
use proto::block::Fingerprint;
use proto::residency::FingerprintMap;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Most placements open at once: 1,024 engines with 64 requests each that they have not finished.
pub const MOST: usize = 65_536;
/// Most coming blocks at once, over all placements: 2^21 x (8 bytes in the placement + about 24 in the engine's map)
/// are 64 MiB. A placement beyond it counts as load, its blocks do not count as coming.
pub const MOST_BLOCKS: usize = 1 << 21;
/// Longest life of a placement that nobody ends, in milliseconds.
pub const LONGEST_MS: u64 = 300_000;

/// A UUID as a number: what [`proto::event::picker_request_id`] finds, in any case of letters.
pub type RequestNumber = u128;

/// The number of a UUID in its form of 36 characters.
pub fn request_number(id: &str) -> Option<RequestNumber> {
    let id = proto::event::picker_request_id(id).filter(|found| found.len() == id.len())?;
    let mut number = 0u128;
    for digit in id.chars().filter_map(|c| c.to_digit(16)) {
        number = number << 4 | u128::from(digit);
    }
    Some(number)
}

#[derive(Debug)]
struct Open {
    engine: u32,
    tokens: u32,
    at_ms: u64,
    arrived: bool,
    fingerprints: Vec<Fingerprint>,
}

#[derive(Debug, Default)]
struct Engine {
    reserved: Reserved,
    coming: FingerprintMap<u32>,
}

/// The open placements.
#[derive(Debug, Default)]
pub struct Reservations {
    open: HashMap<RequestNumber, Open>,
    engines: BTreeMap<u32, Engine>,
    /// Oldest first, to end what nobody ends. Holds ended ones too until their time; [`Reservations::sweep`] and the
    /// bound in [`Reservations::reserve`] keep it below twice [`MOST`].
    order: VecDeque<(u64, RequestNumber)>,
    blocks: usize,
}

impl Reservations {
    /// Open placements.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Is none open?
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Blocks that are coming, over all placements.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Opens a placement on the engine in `slot`. Telling the same request again replaces what was told before: a
    /// request is in one place.
    ///
    /// # Errors
    /// A bad id, too many fingerprints, or [`MOST`] open placements.
    pub fn reserve(&mut self, slot: u32, placement: Placement, now_ms: u64) -> Result<(), NotReserved> {
        let Some(number) = request_number(&placement.request_id) else {
            return Err(NotReserved::BadId(placement.request_id.chars().take(64).collect()));
        };
        if placement.fingerprints.len() > MAX_FINGERPRINTS {
            return Err(NotReserved::TooLong(placement.fingerprints.len()));
        }
        self.end(number);
        self.sweep(now_ms);
        if self.open.len() >= MOST {
            return Err(NotReserved::Full(MOST));
        }
        if self.order.len() >= 2 * MOST {
            let open = &self.open;
            self.order.retain(|(at, number)| open.get(number).is_some_and(|one| one.at_ms == *at));
        }
        let mut fingerprints = placement.fingerprints;
        if self.blocks + fingerprints.len() > MOST_BLOCKS {
            fingerprints = Vec::new();
        }
        self.blocks += fingerprints.len();
        let engine = self.engines.entry(slot).or_default();
        engine.reserved.requests += 1;
        engine.reserved.tokens += u64::from(placement.tokens);
        for fp in &fingerprints {
            *engine.coming.entry(*fp).or_insert(0) += 1;
        }
        self.order.push_back((now_ms, number));
        let open = Open { engine: slot, tokens: placement.tokens, at_ms: now_ms, arrived: false, fingerprints };
        self.open.insert(number, open);
        Ok(())
    }

    /// The engine's scheduler has it: its own queue counts it now.
    pub fn arrived(&mut self, slot: u32, number: RequestNumber) {
        if let Some(open) = self.open.get_mut(&number).filter(|open| open.engine == slot && !open.arrived) {
            open.arrived = true;
            let tokens = open.tokens;
            self.unload(slot, tokens);
        }
    }

    /// The engine says it ended.
    pub fn finished(&mut self, slot: u32, number: RequestNumber) {
        if self.open.get(&number).is_some_and(|open| open.engine == slot) {
            self.end(number);
        }
    }

    /// The picker says it will not come.
    pub fn release(&mut self, request_id: &str) -> bool {
        request_number(request_id).is_some_and(|number| self.end(number))
    }

    /// The engine's process life ended, and all its requests with it.
    pub fn epoch_ended(&mut self, slot: u32) {
        let gone: Vec<RequestNumber> =
            self.open.iter().filter(|(_, open)| open.engine == slot).map(|(number, _)| *number).collect();
        gone.into_iter().for_each(|number| {
            self.end(number);
        });
    }

    /// Ends what is older than [`LONGEST_MS`].
    pub fn sweep(&mut self, now_ms: u64) {
        while let Some((at_ms, number)) = self.order.front().copied() {
            let open = self.open.get(&number).is_some_and(|open| open.at_ms == at_ms);
            if open && now_ms.saturating_sub(at_ms) <= LONGEST_MS {
                return;
            }
            if open {
                self.end(number);
            }
            self.order.pop_front();
        }
    }

    /// What is reserved on an engine and not yet seen by it.
    pub fn reserved(&self, slot: u32) -> Reserved {
        self.engines.get(&slot).map(|engine| engine.reserved).unwrap_or_default()
    }

    /// How many leading blocks of a prompt the engine has or will have, when it has `there` of them. By bisection: a
    /// fingerprint names all before it, so what one placement brings of a prompt is a leading part of it.
    pub fn coming(&self, slot: u32, prompt: &[Fingerprint], there: usize) -> usize {
        let Some(engine) = self.engines.get(&slot).filter(|engine| !engine.coming.is_empty()) else { return there };
        let there = there.min(prompt.len());
        let rest = &prompt[there..];
        match rest.first() {
            Some(first) if engine.coming.contains_key(first) => {
                there + rest.partition_point(|fp| engine.coming.contains_key(fp))
            }
            _ => there,
        }
    }

    fn unload(&mut self, slot: u32, tokens: u32) {
        if let Some(engine) = self.engines.get_mut(&slot) {
            engine.reserved.requests = engine.reserved.requests.saturating_sub(1);
            engine.reserved.tokens = engine.reserved.tokens.saturating_sub(u64::from(tokens));
        }
    }

    fn end(&mut self, number: RequestNumber) -> bool {
        let Some(open) = self.open.remove(&number) else { return false };
        if !open.arrived {
            self.unload(open.engine, open.tokens);
        }
        self.blocks -= open.fingerprints.len();
        if let Some(engine) = self.engines.get_mut(&open.engine) {
            for fp in &open.fingerprints {
                if let Some(count) = engine.coming.get_mut(fp) {
                    *count -= 1;
                    if *count == 0 {
                        engine.coming.remove(fp);
                    }
                }
            }
            if engine.reserved == Reserved::default() && engine.coming.is_empty() {
                self.engines.remove(&open.engine);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u32) -> String {
        format!("0f8fad5b-d9cb-469f-a165-{n:012}")
    }

    fn placement(n: u32, fingerprints: &[u64]) -> Placement {
        Placement { engine: "a.0".into(), request_id: id(n), fingerprints: fingerprints.to_vec(), tokens: 10 }
    }

    fn number(n: u32) -> u128 {
        request_number(&id(n)).unwrap_or_default()
    }

    #[test]
    fn load_ends_at_arrival_and_blocks_at_the_end() -> Result<(), NotReserved> {
        let mut book = Reservations::default();
        book.reserve(3, placement(1, &[11, 12, 13]), 0)?;
        book.reserve(3, placement(2, &[11, 12]), 0)?;
        assert_eq!(book.reserved(3), Reserved { requests: 2, tokens: 20 });
        assert_eq!(book.coming(3, &[11, 12, 13, 14], 1), 3);
        assert_eq!(book.coming(4, &[11, 12, 13, 14], 1), 1);
        book.arrived(4, number(1)); // Another engine's word does not count.
        assert_eq!(book.reserved(3).requests, 2);
        book.arrived(3, number(1));
        book.arrived(3, number(1));
        assert_eq!(book.reserved(3), Reserved { requests: 1, tokens: 10 });
        book.finished(3, number(1));
        assert_eq!(book.coming(3, &[11, 12, 13, 14], 1), 2);
        assert!(book.release(&id(2)) && !book.release(&id(2)));
        assert_eq!((book.len(), book.blocks(), book.engines.len()), (0, 0, 0));
        Ok(())
    }

    #[test]
    fn told_twice_counts_once_and_all_ends_with_the_epoch() -> Result<(), NotReserved> {
        let mut book = Reservations::default();
        book.reserve(3, placement(1, &[11]), 0)?;
        book.reserve(5, placement(1, &[11]), 7)?;
        assert_eq!((book.reserved(3), book.reserved(5).requests, book.len()), (Reserved::default(), 1, 1));
        book.epoch_ended(3);
        assert_eq!(book.len(), 1);
        book.epoch_ended(5);
        assert_eq!((book.len(), book.blocks()), (0, 0));
        Ok(())
    }

    #[test]
    fn what_nobody_ends_ends_by_itself() -> Result<(), NotReserved> {
        let mut book = Reservations::default();
        book.reserve(3, placement(1, &[11]), 0)?;
        book.reserve(3, placement(2, &[11]), 100)?;
        book.sweep(LONGEST_MS);
        assert_eq!(book.len(), 2);
        book.sweep(LONGEST_MS + 1);
        assert_eq!((book.len(), book.coming(3, &[11], 0)), (1, 1));
        book.sweep(LONGEST_MS + 101);
        assert_eq!((book.len(), book.coming(3, &[11], 0)), (0, 0));
        Ok(())
    }

    #[test]
    fn the_book_is_bounded() -> Result<(), NotReserved> {
        let mut book = Reservations::default();
        for n in 0..MOST as u32 {
            book.reserve(n % 7, placement(n, &[]), 0)?;
        }
        assert_eq!(book.reserve(0, placement(u32::MAX, &[]), 0), Err(NotReserved::Full(MOST)));
        // The same request again and again leaves no trail.
        for n in 0..3 * MOST as u64 {
            book.reserve(0, placement(1, &[]), n / 1000)?;
        }
        assert!(book.order.len() <= 2 * MOST);
        assert!(matches!(
            book.reserve(0, Placement { request_id: "x".into(), ..placement(1, &[]) }, 0),
            Err(NotReserved::BadId(_))
        ));
        Ok(())
    }

    #[test]
    fn too_many_coming_blocks_leave_the_load() -> Result<(), NotReserved> {
        let mut book = Reservations::default();
        let many: Vec<u64> = (1..=MAX_FINGERPRINTS as u64).collect();
        for n in 0..(MOST_BLOCKS / MAX_FINGERPRINTS) as u32 {
            book.reserve(1, placement(n, &many), 0)?;
        }
        book.reserve(2, placement(1000, &[5]), 0)?;
        assert_eq!((book.reserved(2).requests, book.coming(2, &[5], 0)), (1, 0));
        assert!(book.blocks() <= MOST_BLOCKS);
        Ok(())
    }
}
