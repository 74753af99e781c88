//! Interned sets of holders: each distinct set exists once, has an id, is counted, and is reclaimed.
//!
//! Id 0 is the empty set. The table's slots name sets by id; the count of a set is the number of slots that name it.
//! A set that no slot names is retired, comes back unharmed if it is asked for before it is reclaimed, and gives its
//! id back after every reader that could have read it has left.

use crate::find::Bits;
use crate::shared::pins::{Limbo, Slab};
use std::collections::VecDeque;
use std::sync::Arc;

/// Words that a record holds itself: with the two numbers and the box, one line of 64 bytes.
const NEAR: usize = 5;

/// A set as readers see it: the words from its first to its last holder.
#[repr(align(64))]
#[derive(Default)]
pub(crate) struct Record {
    first: u32,
    len: u32,
    near: [u64; NEAR],
    /// All words, where they are more than [`NEAR`].
    far: Box<[u64]>,
}

impl Record {
    fn new(first: usize, words: &[u64]) -> Record {
        let mut record = Record { first: first as u32, len: words.len() as u32, ..Record::default() };
        match record.near.get_mut(..words.len()) {
            Some(near) => near.copy_from_slice(words),
            None => record.far = words.into(),
        }
        record
    }

    /// The holders.
    #[inline]
    pub(crate) fn bits(&self) -> Bits<'_> {
        let words = self.near.get(..self.len as usize).unwrap_or(&self.far);
        Bits { first: self.first as usize, words }
    }
}

/// What only the writer needs to know of a set.
#[derive(Default, Clone, Copy)]
struct Meta {
    hash: u64,
    /// Slots that name the set.
    count: u32,
    /// Goes up when the id is given to another set, so that remembered moves fail.
    serial: u32,
    /// When the last slot let go of it.
    left: u64,
    /// In the queue of those to reclaim.
    queued: bool,
}

/// A remembered transition: `from` with or without a holder is `to`.
#[derive(Default, Clone, Copy)]
struct Move {
    from: u32,
    /// Holder number x 2, + 1 for removal, + 1: never 0, so an unused place matches nothing.
    what: u32,
    to: u32,
    serials: (u32, u32),
}

/// Remembered transitions, direct-mapped: a store or removal of a run asks once, so few places go far. 160 KiB.
const MOVES: usize = 1 << 13;
/// Least size of the index of sets.
const MIN_PLACES: usize = 64;

/// All sets, on the writer's side.
pub(crate) struct Sets {
    slab: Arc<Slab<Record>>,
    metas: Vec<Meta>,
    free: Vec<u32>,
    /// Sets without slots, in about the order in which they lost them. Each is in it once, so it is bounded.
    queue: VecDeque<u32>,
    /// Open addressing by hash, linear; 0 is a free place. Never more than half full.
    places: Vec<u32>,
    live: usize,
    moves: Box<[Move]>,
    /// For building a set.
    words: Vec<u64>,
    far_bytes: usize,
}

fn hash(first: usize, words: &[u64]) -> u64 {
    let mix = |sum: u64, word: u64| {
        let product = u128::from(sum ^ word) * 0x9E37_79B9_7F4A_7C15_u128;
        (product >> 64) as u64 ^ product as u64
    };
    words.iter().fold(mix(!0, first as u64 + 1), |sum, word| mix(sum.rotate_left(23), *word ^ 0x2545_F491_4F6C_DD1D))
}

/// `words` without the zeros at both ends, and the number of the first left.
fn trim(first: usize, words: &[u64]) -> (usize, &[u64]) {
    let Some(from) = words.iter().position(|word| *word != 0) else { return (0, &[]) };
    let to = words.iter().rposition(|word| *word != 0).unwrap_or(from);
    (first + from, &words[from..=to])
}

impl Sets {
    pub(crate) fn new(limbo: &Limbo) -> Sets {
        let slab = Arc::new(Slab::new());
        slab.put(0, 0, Record::default(), limbo);
        Sets {
            slab,
            metas: vec![Meta::default()],
            free: vec![],
            queue: VecDeque::new(),
            places: vec![0; MIN_PLACES],
            live: 0,
            moves: vec![Move::default(); MOVES].into(),
            words: vec![],
            far_bytes: 0,
        }
    }

    /// The sets as readers see them.
    pub(crate) fn slab(&self) -> &Arc<Slab<Record>> {
        &self.slab
    }

    /// The holders in set `id`.
    #[inline]
    pub(crate) fn bits(&self, id: u32) -> Bits<'_> {
        self.slab.get(id).map_or(Bits { first: 0, words: &[] }, Record::bits)
    }

    /// Is `holder` in set `id`?
    #[inline]
    pub(crate) fn has(&self, id: u32, holder: u32) -> bool {
        self.bits(id).has(holder)
    }

    /// `id` with `holder`: `id` itself if it has it.
    pub(crate) fn with(&mut self, id: u32, holder: u32, limbo: &Limbo) -> u32 {
        self.moved(id, holder, false, limbo)
    }

    /// `id` without `holder`: `id` itself if it lacks it.
    pub(crate) fn without(&mut self, id: u32, holder: u32, limbo: &Limbo) -> u32 {
        self.moved(id, holder, true, limbo)
    }

    fn moved(&mut self, from: u32, holder: u32, removal: bool, limbo: &Limbo) -> u32 {
        if self.has(from, holder) != removal {
            return from;
        }
        let what = (holder << 1 | u32::from(removal)) + 1;
        let key = u64::from(from) << 32 | u64::from(what);
        let place = (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 51) as usize % MOVES;
        let known = self.moves[place];
        let serial = |id: u32| self.metas.get(id as usize).map_or(0, |meta| meta.serial);
        if (known.from, known.what) == (from, what) && known.serials == (serial(from), serial(known.to)) {
            return known.to;
        }
        let mut words = std::mem::take(&mut self.words);
        words.clear();
        let (word, bits) = (holder as usize / 64, self.bits(from));
        let first = if bits.words.is_empty() { word } else { bits.first.min(word) };
        words.resize(bits.first.max(first) - first, 0);
        words.extend_from_slice(bits.words);
        words.resize(words.len().max(word - first + 1), 0);
        words[word - first] ^= 1 << (holder % 64);
        let to = self.intern(first, &words, limbo);
        self.words = words;
        self.moves[place] =
            Move { from, what, to, serials: (self.metas[from as usize].serial, self.metas[to as usize].serial) };
        to
    }

    /// `id` without every holder in `mask`.
    pub(crate) fn without_all(&mut self, id: u32, mask: &[u64], limbo: &Limbo) -> u32 {
        let mut words = std::mem::take(&mut self.words);
        let bits = self.bits(id);
        let masks = mask.get(bits.first..).unwrap_or(&[]);
        let touched = bits.words.iter().zip(masks).any(|(word, mask)| word & mask != 0);
        let mut to = id;
        if touched {
            words.clear();
            words.extend_from_slice(bits.words);
            words.iter_mut().zip(masks).for_each(|(word, mask)| *word &= !mask);
            to = self.intern(bits.first, &words, limbo);
        }
        self.words = words;
        to
    }

    fn intern(&mut self, first: usize, words: &[u64], limbo: &Limbo) -> u32 {
        let (first, words) = trim(first, words);
        if words.is_empty() {
            return 0;
        }
        let hash = hash(first, words);
        let wanted = Bits { first, words };
        let mut place = hash as usize & (self.places.len() - 1);
        while self.places[place] != 0 {
            let id = self.places[place];
            if self.metas[id as usize].hash == hash && self.bits(id) == wanted {
                return id;
            }
            place = (place + 1) & (self.places.len() - 1);
        }
        let record = Record::new(first, words);
        let far_bytes = size_of_val::<[u64]>(&record.far);
        let fresh = self.metas.len() as u32;
        // A free id has passed its readers (see `reclaim`), a fresh one never had any: stamp 0.
        let id = self.free.pop().unwrap_or(fresh);
        if !self.slab.put(id, 0, record, limbo) {
            // 2^32 sets: beyond any machine. Whoever asked sees the empty set, that is, fewer blocks.
            return 0;
        }
        if id == fresh {
            self.metas.push(Meta::default());
        }
        self.far_bytes += far_bytes;
        let meta = &mut self.metas[id as usize];
        *meta = Meta { hash, serial: meta.serial, ..Meta::default() };
        self.places[place] = id;
        self.live += 1;
        if self.live * 2 > self.places.len() {
            self.resize(self.places.len() * 2);
        }
        id
    }

    fn resize(&mut self, len: usize) {
        let old = std::mem::replace(&mut self.places, vec![0; len]);
        for id in old.into_iter().filter(|id| *id != 0) {
            let mut place = self.metas[id as usize].hash as usize & (len - 1);
            while self.places[place] != 0 {
                place = (place + 1) & (len - 1);
            }
            self.places[place] = id;
        }
    }

    /// `slots` slots went from naming set `from` to naming set `to`.
    pub(crate) fn recount(&mut self, from: u32, to: u32, slots: u32, limbo: &mut Limbo) {
        if to != 0 {
            self.metas[to as usize].count += slots;
        }
        if from == 0 {
            return;
        }
        let meta = &mut self.metas[from as usize];
        meta.count -= slots;
        if meta.count == 0 {
            meta.left = limbo.stamp();
            if !meta.queued {
                meta.queued = true;
                self.queue.push_back(from);
            }
        }
    }

    /// Takes back the ids of sets without slots whose readers have left. Once an operation.
    pub(crate) fn reclaim(&mut self, limbo: &Limbo) {
        while let Some(&id) = self.queue.front() {
            let meta = &mut self.metas[id as usize];
            if meta.count == 0 && !limbo.passed(meta.left) {
                // The front may have lost its last slot anew after others behind it: they only wait longer.
                return;
            }
            self.queue.pop_front();
            meta.queued = false;
            if meta.count == 0 {
                self.free(id, limbo);
            }
        }
    }

    fn free(&mut self, id: u32, limbo: &Limbo) {
        let meta = &mut self.metas[id as usize];
        meta.serial = meta.serial.wrapping_add(1);
        let (hash, left) = (meta.hash, meta.left);
        self.far_bytes -= self.slab.get(id).map_or(0, |record| size_of_val::<[u64]>(&record.far));
        self.slab.put(id, left, Record::default(), limbo);
        self.free.push(id);
        self.live -= 1;
        // Linear probing without tombstones: close the gap.
        let mask = self.places.len() - 1;
        let mut gap = hash as usize & mask;
        while self.places[gap] != id {
            gap = (gap + 1) & mask;
        }
        let mut next = (gap + 1) & mask;
        while self.places[next] != 0 {
            let home = self.metas[self.places[next] as usize].hash as usize & mask;
            if next.wrapping_sub(home) & mask >= next.wrapping_sub(gap) & mask {
                self.places[gap] = self.places[next];
                gap = next;
            }
            next = (next + 1) & mask;
        }
        self.places[gap] = 0;
        if self.places.len() > MIN_PLACES && self.live * 16 < self.places.len() {
            self.resize(self.places.len() / 4);
        }
    }

    /// Distinct sets, those waiting to be reclaimed included; the empty one is not counted.
    pub(crate) fn len(&self) -> usize {
        self.live
    }

    /// Places for remembered transitions.
    pub(crate) fn transitions(&self) -> usize {
        MOVES
    }

    /// Bytes of all of it.
    pub(crate) fn bytes(&self) -> usize {
        self.slab.bytes()
            + self.far_bytes
            + self.metas.capacity() * size_of::<Meta>()
            + (self.free.capacity() + self.queue.capacity() + self.places.capacity()) * size_of::<u32>()
            + size_of_val::<[Move]>(&self.moves)
    }
}
