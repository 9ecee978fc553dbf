//! Memory access of the pool: bytes of objects, and pages of spans.
#![expect(unsafe_code)]
// UNSAFETY: reads and writes objects in the arena's shared memory, and exchanges spans with the
// arena.

use std::ops::Range;
use std::ptr::NonNull;

use super::{
    BackRef, CLASS_STEP_BYTES, NewObject, OwnedSpan, PAGE_BYTES, Pool, Result, SPAN_BYTES, UnusedSpan,
};
use freestone_core::slot::{SlotGuard, Word};

/// Cache line size in bytes on common x86-64 machines; a wrong value only costs time.
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

/// Returns the byte offset in the arena, and the length in bytes, of a range of a span's pages.
fn bytes_of(span: &OwnedSpan, pages: &Range<u32>) -> (u64, u64) {
    let at = u64::from(span.number()) * SPAN_BYTES + u64::from(pages.start) * PAGE_BYTES as u64;
    (at, pages.len() as u64 * PAGE_BYTES as u64)
}

impl Pool {
    #[inline]
    pub(super) fn fill(&self, taken: &mut NewObject, data: &[u8]) {
        freestone_core::trail::step!();
        // SAFETY: the object is in no slot and belongs to the caller.
        unsafe { self.put(taken.0.location(), data) };
    }

    /// Overwrites the object of a locked slot in place with `data` of the [same size
    /// class](Self::same_class). The caller must publish the matching slot word.
    ///
    /// The mutable borrow of the guard excludes slices from [`object`](Self::object).
    #[inline]
    pub fn overwrite(&self, guard: &mut SlotGuard<'_>, data: &[u8]) {
        let word = guard.word();
        if let Some(location) = word.object() {
            assert!(
                Self::same_class(data.len(), word.stored_bytes()),
                "an object can only be overwritten by one of its class"
            );
            // SAFETY: the object's slot is locked, and `&mut` excludes any slice of it.
            unsafe { self.put(location, data) };
        }
    }

    /// Overwrites the first half of a locked slot's object, as a process that is killed during
    /// [`overwrite`](Self::overwrite) does.
    pub fn overwrite_half(&self, guard: &mut SlotGuard<'_>, data: &[u8]) {
        if let Some(location) = guard.word().object() {
            let half = &data[..data.len().min(guard.word().stored_bytes()).div_ceil(2)];
            // SAFETY: the object's slot is locked, and `&mut` excludes any slice of it.
            unsafe { self.put(location, half) };
        }
    }

    /// Completes the overwrite of an object by another process, from `word` to `new`, before the pool is
    /// rebuilt. Returns false, and changes nothing, if the words do not belong together.
    pub fn complete_overwrite(&self, word: Word, new: Word, data: &[u8]) -> bool {
        let Some(location) = word.object().filter(|location| new.object() == Some(*location)) else {
            return false;
        };
        let at = location * CLASS_STEP_BYTES as u64;
        let is_whole = new.stored_bytes() == data.len() && Self::same_class(data.len(), word.stored_bytes());
        let is_mapped = |at| self.arena.find(at).is_some();
        // A segment of the arena is a multiple of a span, so both ends are in mapped segments together.
        if !is_whole || !is_mapped(at) || !is_mapped(at + data.len() as u64 - 1) {
            return false;
        }
        // SAFETY: no other thread uses the pool, and the bytes are mapped.
        unsafe { self.put(location, data) };
        true
    }

    /// # Safety
    /// The object must have room for the data, be resident and belong to the caller: its bit is
    /// set, and its location is in no slot, or in one that the caller has locked.
    #[inline]
    unsafe fn put(&self, location: u64, data: &[u8]) {
        let to = self.arena.at(location * CLASS_STEP_BYTES as u64);
        // The destination is rarely cached. Prefetching loads its cache lines in parallel.
        // Otherwise the copy loads the lines one by one, and the next locked instruction waits for
        // all loads.
        prefetch::<true>(to, data.len());
        // SAFETY: guaranteed by the caller.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to.as_ptr(), data.len()) };
    }

    /// Prefetches the object of a slot for reading. The prefetch is a hint: without the slot's lock
    /// `word` may be outdated, and the object's memory may not be visible to this thread yet.
    #[inline]
    pub fn prefetch_for_read(&self, word: Word) {
        self.prefetch::<false>(word);
    }

    /// Prefetches the object of a slot for writing; see
    /// [`prefetch_for_read`](Self::prefetch_for_read).
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

    /// Returns the bytes of a locked slot's object; empty if the slot does not hold an object.
    #[inline]
    pub fn object<'g>(&'g self, guard: &'g SlotGuard<'_>) -> &'g [u8] {
        let word = guard.word();
        match word.object() {
            // SAFETY: the slot is locked for as long as the slice lives.
            Some(location) => unsafe { self.view(location, word.stored_bytes()) },
            None => &[],
        }
    }

    /// Returns the first `len` bytes of the object at `location`.
    ///
    /// # Safety
    /// The object must have `len` bytes, and must not be written or freed while the slice lives:
    /// the caller has locked the slot that holds it, or it is in no slot and belongs to the caller.
    #[inline]
    pub(super) unsafe fn view(&self, location: u64, len: usize) -> &[u8] {
        let from = self.arena.at(location * CLASS_STEP_BYTES as u64);
        // SAFETY: guaranteed by the caller; memory of the arena is initialised.
        unsafe { std::slice::from_raw_parts(from.as_ptr(), len) }
    }

    /// Updates the back-reference of an object that moves between two locked slots.
    pub fn set_owner(&self, location: u64, owner: BackRef) {
        let place = self.place(location);
        // SAFETY: the object is in a locked slot, or was just removed from one.
        unsafe { self.backrefs.set_for_object(place.span, place.object, owner) };
    }

    pub(super) fn alloc_span(&self) -> Result<UnusedSpan> {
        let span = self.arena.alloc()?;
        // SAFETY: the arena has just returned the span.
        Ok(unsafe { UnusedSpan::new(span) })
    }

    /// Drops the state of all spans, and returns the tokens of all spans ever allocated. `&mut
    /// self` guarantees that no other token exists.
    pub(super) fn all_unused(&mut self) -> Vec<UnusedSpan> {
        self.spans = super::Spans::new(super::CLASSES);
        self.empties.lock().clear();
        for current in self.currents().flat_map(|cpu| cpu.iter()) {
            *current.lock() = None;
        }
        self.arena.clear_free_list();
        // SAFETY: all other tokens were dropped above; the arena counts all these spans as
        // allocated.
        (0..self.arena.units_ever_allocated()).map(|span| unsafe { UnusedSpan::new(span) }).collect()
    }

    /// Returns all memory of the pool to the system. `progress` receives the bytes released and the
    /// total.
    pub fn release_memory(mut self, progress: &mut dyn FnMut(u64, u64)) {
        self.arena.release_all(progress);
    }

    /// Returns a span to the arena. The caller must have released the memory of the span before.
    pub(super) fn return_span(&self, span: UnusedSpan) {
        // SAFETY: consumes the only token.
        unsafe { self.arena.free(span.into_number()) };
    }

    /// Makes a range of a span's pages resident. On failure, none of these pages is resident.
    pub(super) fn make_pages_resident(&self, span: &OwnedSpan, pages: Range<u32>) -> Result<()> {
        let (at, len) = bytes_of(span, &pages);
        self.arena.populate(at, len).inspect_err(|_| {
            // Some of the pages may have become resident.
            self.release_pages(span, pages);
        })
    }

    /// Returns the memory of span pages without objects to the system.
    pub(super) fn release_pages(&self, span: &OwnedSpan, pages: Range<u32>) {
        let (at, len) = bytes_of(span, &pages);
        // SAFETY: the caller owns the span, so no object is created there meanwhile, and none
        // exists.
        unsafe { self.arena.release(at, len) };
    }
}
