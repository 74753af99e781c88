//! One lookup: the table, the board and the placements together. The only code path of gRPC, HTTP and embedded mode.

use super::board::{Board, names};
use crate::answer::{EngineMatch, Matched, NotReserved, Placement, Query, Reserved, Status};
use crate::reservations::Reservations;
use crate::shared::Reader;
use proto::block;
use proto::event::HitRule;
use proto::hit;
use proto::id::SetKind;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// Readers kept for the next lookup: as many as run at once on a large machine.
const MOST_READERS: usize = 64;

struct Desk {
    reader: Reader,
    depths: Vec<[u32; 2]>,
    seen: Vec<u32>,
}

/// Everything that a lookup needs.
pub struct Lookup {
    /// The fleet.
    pub board: Arc<Board>,
    /// The open placements. A lookup holds the lock for one probe an engine, a placement for one step a block.
    book: Arc<Mutex<Reservations>>,
    desks: Mutex<Vec<Desk>>,
    first: Mutex<Reader>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Lookup {
    /// Looks up in what `reader` reads.
    pub fn new(board: Arc<Board>, book: Arc<Mutex<Reservations>>, reader: Reader) -> Self {
        Self { board, book, desks: Mutex::default(), first: Mutex::new(reader) }
    }

    /// What would each engine take from its cache?
    pub fn find(&self, query: &Query<'_>) -> Matched {
        let mut desk = lock(&self.desks).pop().unwrap_or_else(|| Desk {
            reader: lock(&self.first).clone(),
            depths: Vec::new(),
            seen: Vec::new(),
        });
        let matched = self.find_at(&mut desk, query);
        let mut desks = lock(&self.desks);
        if desks.len() < MOST_READERS {
            desks.push(desk);
        }
        matched
    }

    fn find_at(&self, desk: &mut Desk, query: &Query<'_>) -> Matched {
        let now_ms = self.board.clock.now_ms();
        let leases = &self.board.leases;
        let seats = self.board.seats();
        let wanted = |status: &Status| query.candidates.is_empty() || query.candidates.iter().any(|c| names(status, c));
        let started = Instant::now();
        let answer = desk.reader.find(query.fingerprints);
        answer.depths(&mut desk.depths);
        desk.seen.clear();
        let lookup_ns = started.elapsed().as_nanos() as u64;
        let mut engines =
            Vec::with_capacity(if query.candidates.is_empty() { seats.len() } else { query.candidates.len() });
        for seat in seats.iter() {
            let status = seat.status();
            if !wanted(&status) {
                continue;
            }
            let mut depths = desk.depths.get(seat.slot as usize).copied().unwrap_or_default();
            let same = status.block_size() == query.block_size && status.rule().ahead() == query.ahead;
            for kind in [SetKind::Gpu, SetKind::Any] {
                if !same || !status.credited(kind, now_ms, leases) {
                    depths[kind.index()] = 0;
                }
            }
            let (block_size, prompt_tokens) = (query.block_size as usize, query.prompt_tokens as usize);
            let mut gpu_blocks = depths[SetKind::Gpu.index()];
            // Agents of engines with one tier publish *gpu* alone: *any* contains it by definition.
            let mut any_blocks = depths[SetKind::Any.index()].max(gpu_blocks);
            let cached = match status.rule() {
                // What comes from a tier below is no hit of the engine's own cache: it is in `any_blocks`.
                HitRule::Closed => block::cached_tokens(gpu_blocks as usize, block_size, prompt_tokens),
                HitRule::Sets(hits) if same && block_size > 0 => {
                    let has = |set: usize, at| {
                        let kind = u8::try_from(set).ok().and_then(SetKind::of_spec);
                        kind.filter(|kind| status.credited(*kind, now_ms, leases))
                            .is_some_and(|kind| answer.has(&mut desk.seen, seat.slot, kind, at))
                    };
                    let hit = hit::find(hits, prompt_tokens, has).unwrap_or(0);
                    // Blocks that no hit can end in are worth nothing: the hit itself is what counts.
                    gpu_blocks = (hit / block_size) as u32;
                    any_blocks = any_blocks.max(gpu_blocks);
                    hit
                }
                HitRule::Sets(_) | HitRule::Unknown => 0,
            };
            engines.push(EngineMatch {
                state: status.state_at(now_ms, leases),
                age_ms: status.age_ms(now_ms),
                gpu_blocks,
                any_blocks,
                cached_tokens: cached as u32,
                coming_blocks: gpu_blocks,
                reserved: Reserved::default(),
                status,
            });
        }
        drop(answer);
        let book = lock(&self.book);
        if !book.is_empty() {
            for one in &mut engines {
                let slot = one.status.slot;
                one.reserved = book.reserved(slot);
                if one.status.block_size() == query.block_size && one.status.rule().ahead() == query.ahead {
                    one.coming_blocks = book.coming(slot, query.fingerprints, one.gpu_blocks as usize) as u32;
                }
            }
        }
        Matched { engines, lookup_ns }
    }

    /// The engines that have one block, whatever their state.
    pub fn holders_of(&self, fingerprint: u64) -> Vec<(Arc<Status>, SetKind)> {
        let mut reader = lock(&self.first).clone();
        let mut held = Vec::new();
        reader.holders_of(fingerprint, |one| held.push(one));
        let seats = self.board.seats();
        held.into_iter()
            .filter_map(|one| seats.iter().find(|seat| seat.slot == one.engine).map(|seat| (seat.status(), one.kind)))
            .collect()
    }

    /// Opens a placement.
    ///
    /// # Errors
    /// An engine that is not in the fleet, or what [`Reservations::reserve`] refuses.
    pub fn reserve(&self, placement: Placement) -> Result<(), NotReserved> {
        let Some(seat) = self.board.find(&placement.engine) else {
            return Err(NotReserved::NoEngine(placement.engine.chars().take(64).collect()));
        };
        lock(&self.book).reserve(seat.slot, placement, self.board.clock.now_ms())
    }

    /// Ends a placement. False when there was none.
    pub fn release(&self, request_id: &str) -> bool {
        lock(&self.book).release(request_id)
    }

    /// Open placements and their coming blocks.
    pub fn reservations(&self) -> (usize, usize) {
        let book = lock(&self.book);
        (book.len(), book.blocks())
    }

    /// What is reserved on one engine.
    pub fn reserved(&self, slot: u32) -> Reserved {
        lock(&self.book).reserved(slot)
    }
}
