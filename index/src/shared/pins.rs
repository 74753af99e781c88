//! Who is reading, and memory that readers may still hold: all the `unsafe` of the core.
//!
//! One writer, many readers. A reader writes the current *era* into its own mark before it looks at anything and 0
//! when it is done. The writer stamps what it has made unreachable with the era, ends the era once an operation, and
//! frees or reuses a thing when no mark is as old as its stamp. With one writer the retired things are plain queues
//! of the writer, which is why this is not a general collector: a pin costs one store and one fence.
//!
//! Why that is safe. Let `x` be unlinked in era `s`, then the era set to `s + 1`. A reader whose mark shows `e > s`
//! read the era after it left `s`, so it sees `x` unlinked. A reader whose mark the writer saw as 0 *after* its own
//! fence has not yet passed the fence in [`Seat::pin`], so all it will read comes after the unlinking. A stale era in
//! a mark only makes the writer wait longer.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

type Kept = (u64, usize, Arc<dyn Send + Sync>);

/// A line of its own (two, for processors that fetch pairs), so that readers do not disturb each other.
#[repr(align(128))]
#[derive(Default)]
struct Mark {
    /// Era in which the reader pinned, 0 when it is not reading.
    pinned: AtomicU64,
    taken: AtomicBool,
}

/// The marks of all readers of one core.
pub(crate) struct Pins {
    era: AtomicU64,
    /// As many as readers existed at once; a dropped reader's mark is taken again.
    marks: Mutex<Vec<Arc<Mark>>>,
    /// What a dropped writer left behind: freed with the last reader.
    parked: Mutex<Vec<VecDeque<Kept>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic runs under these locks.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Pins {
    /// Era 1: a stamp of 0 has always passed.
    pub(crate) fn new() -> Arc<Pins> {
        Arc::new(Pins { era: AtomicU64::new(1), marks: Mutex::default(), parked: Mutex::default() })
    }

    /// The oldest era in which somebody still reads; `now` if nobody does.
    fn oldest(&self, now: u64) -> u64 {
        fence(Ordering::SeqCst);
        let pinned = |mark: &Arc<Mark>| Some(mark.pinned.load(Ordering::Acquire)).filter(|era| *era != 0);
        lock(&self.marks).iter().filter_map(pinned).min().unwrap_or(now).min(now)
    }
}

/// A reader's place among the [`Pins`].
pub(crate) struct Seat {
    pins: Arc<Pins>,
    mark: Arc<Mark>,
}

impl Seat {
    /// Takes a free mark, or makes one.
    pub(crate) fn take(pins: &Arc<Pins>) -> Seat {
        let mut marks = lock(&pins.marks);
        let free = marks.iter().find(|mark| !mark.taken.swap(true, Ordering::AcqRel)).cloned();
        let mark = free.unwrap_or_else(|| {
            let mark = Arc::new(Mark { taken: AtomicBool::new(true), ..Mark::default() });
            marks.push(mark.clone());
            mark
        });
        drop(marks);
        Seat { pins: pins.clone(), mark }
    }

    /// From here until the pin is dropped nothing that can be seen is freed. `&mut`: a mark holds one pin.
    #[inline]
    pub(crate) fn pin(&mut self) -> Pin<'_> {
        self.mark.pinned.store(self.pins.era.load(Ordering::Acquire), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Pin { mark: &self.mark }
    }
}

impl Clone for Seat {
    fn clone(&self) -> Self {
        Seat::take(&self.pins)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // A leaked pin must not hold everything for ever: the seat cannot be dropped while a pin borrows it.
        self.mark.pinned.store(0, Ordering::Release);
        self.mark.taken.store(false, Ordering::Release);
    }
}

/// Proof that its reader is marked.
pub(crate) struct Pin<'a> {
    mark: &'a Mark,
}

impl<'a> Pin<'a> {
    /// What is at `place` now, together with this pin.
    #[inline]
    pub(crate) fn hold<T: Send + Sync + 'static>(self, place: &Published<T>) -> Pinned<'a, T> {
        let thing = NonNull::from(place.get(&self));
        Pinned { pin: self, thing }
    }
}

/// A published thing and the pin that keeps it.
pub(crate) struct Pinned<'a, T> {
    pin: Pin<'a>,
    thing: NonNull<T>,
}

impl<'a, T> Pinned<'a, T> {
    #[inline]
    pub(crate) fn pin(&self) -> &Pin<'a> {
        &self.pin
    }
}

impl<T> std::ops::Deref for Pinned<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: loaded from a `Published` under this very pin, which lives as long as `self`; see `Published::get`.
        unsafe { self.thing.as_ref() }
    }
}

// SAFETY: like `&T` and the pin, which is a reference to atomics.
unsafe impl<T: Sync> Send for Pinned<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Pinned<'_, T> {}

impl Drop for Pin<'_> {
    #[inline]
    fn drop(&mut self) {
        self.mark.pinned.store(0, Ordering::Release);
    }
}

/// The writer's side: what was unlinked and waits for readers to leave.
pub(crate) struct Limbo {
    pins: Arc<Pins>,
    now: u64,
    /// Whatever was stamped before this is out of every reader's reach.
    safe: u64,
    used: bool,
    kept: VecDeque<Kept>,
    bytes: usize,
}

impl Limbo {
    pub(crate) fn new(pins: &Arc<Pins>) -> Limbo {
        Limbo { pins: pins.clone(), now: 1, safe: 1, used: false, kept: VecDeque::new(), bytes: 0 }
    }

    /// The stamp for something that is unlinked *before the next* [`Limbo::advance`].
    #[inline]
    pub(crate) fn stamp(&mut self) -> u64 {
        self.used = true;
        self.now
    }

    /// Has every reader left that could see what was stamped so?
    #[inline]
    pub(crate) fn passed(&self, stamp: u64) -> bool {
        stamp < self.safe
    }

    /// [`Limbo::passed`] for the low 31 bits of a stamp. A wrap can only make it say "not yet": an old stamp that looks
    /// as if it came later waits for half a cycle, 2^30 operations; and while a reader stays for 2^29 operations, when
    /// new stamps would begin to look old, nothing passes.
    #[inline]
    pub(crate) fn passed_low(&self, low: u32) -> bool {
        let age = (self.safe as u32).wrapping_sub(low) & 0x7fff_ffff;
        age != 0 && age < 1 << 30 && self.now - self.safe < 1 << 29
    }

    fn keep(&mut self, bytes: usize, thing: Arc<dyn Send + Sync>) {
        let stamp = self.stamp();
        self.bytes += bytes;
        self.kept.push_back((stamp, bytes, thing));
    }

    /// Ends the era if anything was unlinked in it, looks who reads, frees what has passed. Once an operation.
    pub(crate) fn advance(&mut self) {
        if self.used {
            self.used = false;
            self.now += 1;
            self.pins.era.store(self.now, Ordering::Release);
        }
        if self.safe < self.now {
            self.safe = self.pins.oldest(self.now);
        }
        while let Some((_, bytes, _)) = self.kept.front().filter(|kept| kept.0 < self.safe) {
            self.bytes -= bytes;
            self.kept.pop_front();
        }
    }

    /// Bytes kept only because a reader may look at them.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Limbo {
    fn drop(&mut self) {
        lock(&self.pins.parked).push(std::mem::take(&mut self.kept));
    }
}

/// A place where the writer puts a `T` for all to see, and later another.
///
/// All `Published` of a core belong to one [`Pins`], and one writer replaces them: that is what makes
/// [`Published::get`] sound, and why this is private to the crate.
pub(crate) struct Published<T> {
    /// From `Arc::into_raw`: this place owns one count.
    at: AtomicPtr<T>,
}

impl<T: Send + Sync + 'static> Published<T> {
    pub(crate) fn new(first: Arc<T>) -> Self {
        Self { at: AtomicPtr::new(Arc::into_raw(first).cast_mut()) }
    }

    /// What is there now.
    #[inline]
    pub(crate) fn get<'p>(&self, _pin: &'p Pin<'_>) -> &'p T {
        // SAFETY: the pointer came from `Arc::into_raw`, and its count is given up only after `replace` has put it
        // into the limbo and every reader pinned then has left; this reader is pinned for `'p`.
        unsafe { &*self.at.load(Ordering::Acquire) }
    }

    /// Puts `new` there; the one before it, `bytes` large, is freed when the last reader has left it.
    pub(crate) fn replace(&self, new: Arc<T>, bytes: usize, limbo: &mut Limbo) {
        let old = self.at.swap(Arc::into_raw(new).cast_mut(), Ordering::AcqRel);
        // SAFETY: this place owned the count, and has just given it up.
        limbo.keep(bytes, unsafe { Arc::from_raw(old) });
    }
}

impl<T> Drop for Published<T> {
    fn drop(&mut self) {
        // SAFETY: as in `replace`; with `&mut self` nobody can load the pointer any more, and whoever loaded it
        // before holds the core (or, for a place inside a replaced thing, has left before that thing was dropped).
        drop(unsafe { Arc::from_raw(*self.at.get_mut()) });
    }
}

/// First chunk of a [`Slab`]; chunk `k` holds `FIRST << k` places.
const FIRST: u32 = 256;
/// 256 x (2^24 - 1) places: nearly 2^32.
const CHUNKS: usize = 24;

/// Places numbered from 0 that never move. Written by the one writer, read by all, reused after the readers left.
pub(crate) struct Slab<T> {
    chunks: [OnceLock<Box<[UnsafeCell<T>]>>; CHUNKS],
}

// SAFETY: a place is written only while no reader can know its number (see `put`), so shared access is to `T: Sync`
// read-only, and the writer's access is exclusive.
unsafe impl<T: Send + Sync> Sync for Slab<T> {}

impl<T: Default> Slab<T> {
    pub(crate) fn new() -> Self {
        Self { chunks: [const { OnceLock::new() }; CHUNKS] }
    }

    #[inline]
    fn place(number: u32) -> (usize, usize) {
        let chunk = (number / FIRST + 1).ilog2();
        (chunk as usize, (number - FIRST * ((1 << chunk) - 1)) as usize)
    }

    /// What is at `number`; `None` for a number that never was.
    #[inline]
    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        let (chunk, place) = Self::place(number);
        // SAFETY: the caller read `number` from the table while pinned (or is the writer), so `put` is not writing it.
        Some(unsafe { &*self.chunks.get(chunk)?.get()?.get(place)?.get() })
    }

    /// Writes the place of a number that no slot of the table has had since `stamp`; nothing happens, and `false`
    /// comes back, unless every reader of that time has left. Only the writer calls this (it alone has a [`Limbo`]).
    pub(crate) fn put(&self, number: u32, stamp: u64, value: T, limbo: &Limbo) -> bool {
        let (chunk, place) = Self::place(number);
        let Some(chunk_places) = self.chunks.get(chunk).filter(|_| limbo.passed(stamp)) else { return false };
        let fresh = || (0..FIRST << chunk).map(|_| UnsafeCell::new(T::default())).collect();
        let Some(cell) = chunk_places.get_or_init(fresh).get(place) else { return false };
        // SAFETY: no slot has the number and all readers that saw it there have left, so nobody refers to the place;
        // readers that come to know the number later read it from a slot written after this (release, acquire).
        unsafe { *cell.get() = value };
        true
    }

    /// Bytes of the places that exist, used or not.
    pub(crate) fn bytes(&self) -> usize {
        self.chunks.iter().filter_map(OnceLock::get).map(|chunk| size_of_val::<[_]>(chunk)).sum()
    }
}

/// Asks the processor to fetch the line that `thing` is in. Changes nothing but speed.
#[inline(always)]
pub(crate) fn prefetch<T>(thing: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of a valid address has no effect that a program can see; SSE is part of x86-64.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(std::ptr::from_ref(thing).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = thing;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_freed_under_a_pin() {
        let pins = Pins::new();
        let mut limbo = Limbo::new(&pins);
        let mut seat = Seat::take(&pins);
        let place = Published::new(Arc::new(1u64));
        let pin = seat.pin();
        let seen = place.get(&pin);
        place.replace(Arc::new(2), 8, &mut limbo);
        limbo.advance();
        limbo.advance();
        assert_eq!((limbo.bytes(), *seen, *place.get(&pin)), (8, 1, 2));
        drop(pin);
        limbo.advance();
        assert_eq!(limbo.bytes(), 0);
    }

    #[test]
    fn a_later_pin_does_not_hold_earlier_things() {
        let pins = Pins::new();
        let mut limbo = Limbo::new(&pins);
        let mut seat = Seat::take(&pins);
        let stamp = limbo.stamp();
        assert!(!limbo.passed(stamp));
        limbo.pins.era.load(Ordering::Relaxed);
        limbo.used = false;
        limbo.now += 1;
        pins.era.store(limbo.now, Ordering::Release);
        let _pin = seat.pin();
        limbo.advance();
        assert!(limbo.passed(stamp) && limbo.passed_low(stamp as u32));
        let stamp = limbo.stamp();
        limbo.advance();
        assert!(!limbo.passed(stamp) && !limbo.passed_low(stamp as u32));
    }

    #[test]
    fn marks_are_taken_again() {
        let pins = Pins::new();
        let seat = Seat::take(&pins);
        for _ in 0..10 {
            drop(seat.clone());
        }
        assert_eq!(lock(&pins.marks).len(), 2);
    }

    #[test]
    fn a_place_is_not_written_before_its_readers_left() {
        let pins = Pins::new();
        let mut limbo = Limbo::new(&pins);
        let mut seat = Seat::take(&pins);
        let slab = Slab::<u32>::new();
        for number in [0, 255, 256, 767, 768, 100_000] {
            assert!(slab.put(number, 0, number + 1, &limbo));
            assert_eq!(slab.get(number), Some(&(number + 1)));
        }
        let pin = seat.pin();
        let stamp = limbo.stamp();
        limbo.advance();
        assert!(!slab.put(0, stamp, 9, &limbo));
        drop(pin);
        limbo.advance();
        assert!(slab.put(0, stamp, 9, &limbo));
        assert_eq!((slab.get(0), slab.get(u32::MAX)), (Some(&9), None));
    }
}
