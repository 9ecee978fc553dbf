//! What the pool does with memory: bytes of objects, pages of spans.
#![expect(unsafe_code)]
// UNSAFETY: reads and writes objects in the arena's shared memory, and hands spans to the arena and
// back.

use std::ops::Range;
use std::ptr::NonNull;

use super::{BackRef, CLASS_STEP_BYTES, Owned, PAGE_BYTES, Pool, Result, SPAN_BYTES, Taken, Unused};
use freestone_core::slot::{SlotGuard, Word};

/// Bytes of a cache line on the machines that matter here; a wrong guess costs time only.
#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;

#[cfg(target_arch = "x86_64")]
#[inline]
fn prefetch<const WRITE: bool>(from: NonNull<u8>, len: usize) {
    use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};
    for at in (0..len).step_by(LINE_BYTES) {
        let line = from.as_ptr().wrapping_add(at).cast();
        // SAFETY: a prefetch of any address is harmless.
        unsafe { if WRITE { _mm_prefetch::<_MM_HINT_ET0>(line) } else { _mm_prefetch::<_MM_HINT_T0>(line) } }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn prefetch<const WRITE: bool>(_from: NonNull<u8>, _len: usize) {}

/// A span's pages, as the arena counts: where they begin, and how many bytes they have.
fn bytes_of(span: &Owned, pages: &Range<u32>) -> (u64, u64) {
    let at = u64::from(span.number()) * SPAN_BYTES + u64::from(pages.start) * PAGE_BYTES as u64;
    (at, pages.len() as u64 * PAGE_BYTES as u64)
}

impl Pool {
    /// Fills an object that was just taken.
    #[inline]
    pub(super) fn fill(&self, taken: &mut Taken, data: &[u8]) {
        // SAFETY: no slot holds the object, and it is the caller's.
        unsafe { self.put(taken.0.location(), data) };
    }

    /// Replaces the bytes of a locked slot's object by `data` of the [same
    /// class](Self::same_class), in their place. The caller publishes the word that says what they
    /// are now.
    ///
    /// The guard is borrowed as its only user's: nobody has what [`object`](Self::object) showed of
    /// it.
    #[inline]
    pub fn overwrite(&self, guard: &mut SlotGuard<'_>, data: &[u8]) {
        let word = guard.word();
        if let Some(location) = word.object() {
            assert!(
                Self::same_class(data.len(), word.stored_bytes()),
                "an object is overwritten in its class only"
            );
            // SAFETY: the object's slot is locked, and `&mut` says that no slice of it is about.
            unsafe { self.put(location, data) };
        }
    }

    /// # Safety
    /// The object has room for the data, lies in memory and is the caller's alone: its bit is set,
    /// and its location is in no slot, or in one that the caller has locked.
    #[inline]
    unsafe fn put(&self, location: u64, data: &[u8]) {
        let to = self.arena.at(location * CLASS_STEP_BYTES as u64);
        // The place is rarely in the cache: its lines come side by side, not one after the other
        // behind the copy, which the next locked instruction would wait for.
        prefetch::<true>(to, data.len());
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to.as_ptr(), data.len()) };
    }

    /// Fetches the object that a slot was seen to hold into the cache, to be read soon. A hint: the
    /// slot may change, and who saw it without its lock may not see yet where the object's memory
    /// is.
    #[inline]
    pub fn prefetch_for_read(&self, word: Word) {
        self.prefetch::<false>(word);
    }

    /// As [`prefetch_for_read`](Self::prefetch_for_read), to be written soon.
    #[inline]
    pub fn prefetch_for_write(&self, word: Word) {
        self.prefetch::<true>(word);
    }

    #[inline]
    fn prefetch<const WRITE: bool>(&self, word: Word) {
        let place = word.object().and_then(|location| self.arena.find(location * CLASS_STEP_BYTES as u64));
        if let Some(place) = place {
            prefetch::<WRITE>(place, word.stored_bytes());
        }
    }

    /// The bytes of the object that a locked slot holds; empty where it holds none.
    #[inline]
    pub fn object<'g>(&'g self, guard: &'g SlotGuard<'_>) -> &'g [u8] {
        let word = guard.word();
        match word.object() {
            // SAFETY: the slot is locked for as long as the slice lives.
            Some(location) => unsafe { self.view(location, word.stored_bytes()) },
            None => &[],
        }
    }

    /// The bytes of an object.
    ///
    /// # Safety
    /// It has `len` bytes, and is neither written nor freed while the slice lives: the caller has
    /// locked the slot that holds it, or no slot does and it is the caller's.
    #[inline]
    pub(super) unsafe fn view(&self, location: u64, len: usize) -> &[u8] {
        let from = self.arena.at(location * CLASS_STEP_BYTES as u64);
        // SAFETY: the caller's promise; memory of the arena is initialised.
        unsafe { std::slice::from_raw_parts(from.as_ptr(), len) }
    }

    /// The object of a locked slot moves to another slot, which is locked, too.
    pub fn set_owner(&self, location: u64, owner: BackRef) {
        let place = self.place(location);
        // SAFETY: the object is in a locked slot, or was just taken out of one.
        unsafe { self.backrefs.set_held(place.span, place.object, owner) };
    }

    /// A span from the arena.
    pub(super) fn fresh_span(&self) -> Result<Unused> {
        let span = self.arena.alloc()?;
        // SAFETY: the arena has just handed it out.
        Ok(unsafe { Unused::new(span) })
    }

    /// All spans there ever were. Everything that was known of them is forgotten, and with `&mut`
    /// nobody has a witness of one but in what is forgotten here.
    pub(super) fn all_unused(&mut self) -> Vec<Unused> {
        self.spans = super::Spans::new(super::CLASSES);
        self.empties.lock().clear();
        for current in self.currents().flat_map(|cpu| cpu.iter()) {
            *current.lock() = None;
        }
        self.arena.forget_free();
        // SAFETY: see above; the arena takes them all for handed out.
        (0..self.arena.handed_out()).map(|span| unsafe { Unused::new(span) }).collect()
    }

    /// Returns all memory to the system; `progress` is given bytes, done and in all.
    pub fn give_back(mut self, progress: &mut dyn FnMut(u64, u64)) {
        self.arena.give_back(progress);
    }

    /// Gives a span back to the arena. Its memory was returned.
    pub(super) fn return_span(&self, span: Unused) {
        // SAFETY: the witness is spent; there is no other.
        unsafe { self.arena.free(span.into_number()) };
    }

    /// Brings pages of a span into memory; on failure none.
    pub(super) fn bring_in(&self, span: &Owned, pages: Range<u32>) -> Result<()> {
        let (at, len) = bytes_of(span, &pages);
        self.arena.populate(at, len).inspect_err(|_| {
            // Some of it may have come.
            self.send_out(span, pages);
        })
    }

    /// Returns the memory of pages of a span, in which no object lies.
    pub(super) fn send_out(&self, span: &Owned, pages: Range<u32>) {
        let (at, len) = bytes_of(span, &pages);
        // SAFETY: the caller owns the span, so no object is made there meanwhile, and there is
        // none.
        unsafe { self.arena.release(at, len) };
    }
}
