//! Back-references from objects (stored compressed pages) to the slots that hold them. Compaction
//! finds and locks that slot to move an object, so slots need no indirection.
#![expect(unsafe_code)]
// UNSAFETY: one array per span, whose length depends on the span's class and which is replaced when
// the span changes class.

use super::span_table::SpanTable;
use super::spans::{OwnedSpan, UnusedSpan};
use freestone_core::sync::{AtomicPtr, AtomicU64, Ordering};

/// Owner of an object: the id of a slot table of the family, and a slot in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackRef(u64);

const SLOT_BITS: u32 = 36;
const _: () = assert!(freestone_core::slot::MAX_SLOTS <= 1 << SLOT_BITS);
/// Largest id of a slot table that a back-reference can hold.
pub const MAX_TABLE_ID: u32 = (1 << (64 - SLOT_BITS)) - 1;

impl BackRef {
    /// Creates a reference to the slot `slot` of the table `table`.
    #[inline]
    pub const fn new(table: u32, slot: u64) -> Self {
        debug_assert!(table <= MAX_TABLE_ID && slot < 1 << SLOT_BITS);
        Self((table as u64) << SLOT_BITS | slot)
    }

    pub const fn bits(self) -> u64 {
        self.0
    }

    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub const fn table(self) -> u32 {
        (self.0 >> SLOT_BITS) as u32
    }

    pub const fn slot(self) -> u64 {
        self.0 & ((1 << SLOT_BITS) - 1)
    }
}

/// The arrays of back-references, one per span. The owner of a span creates and drops its array and
/// reads its entries. An entry is written by the owner, or under the lock of the slot that holds
/// the object. The latter is safe because a span with an object cannot be dropped.
pub struct BackRefs {
    arrays: SpanTable<AtomicPtr<AtomicU64>>,
    entries: AtomicU64,
}

impl BackRefs {
    pub fn new() -> Self {
        Self { arrays: SpanTable::new(), entries: AtomicU64::new(0) }
    }

    /// Creates the array of a just adopted span with room for `objects` objects.
    pub fn open(&self, span: &OwnedSpan, objects: u32) {
        // The first entry is the number of the other entries.
        let entries: Box<[AtomicU64]> =
            std::iter::once(u64::from(objects)).chain((0..objects).map(|_| 0)).map(AtomicU64::new).collect();
        // Relaxed: a statistic, which orders no other memory access.
        self.entries.fetch_add(entries.len() as u64, Ordering::Relaxed);
        // Release: pairs with the Acquire in `entry` and `take`.
        let before =
            self.arrays.get_or_new(span.number()).swap(Box::into_raw(entries).cast(), Ordering::Release);
        debug_assert!(before.is_null(), "{span:?} has back-references already");
    }

    /// Drops the array of back-references of a span without objects.
    pub fn close(&self, span: &UnusedSpan) {
        self.take(self.arrays.get(span.number()));
    }

    fn take(&self, array: &AtomicPtr<AtomicU64>) {
        // Acquire: pairs with the Release in `open`.
        let pointer = array.swap(std::ptr::null_mut(), Ordering::Acquire);
        if pointer.is_null() {
            return;
        }
        // Relaxed: constant since `open`; its store is visible after the Acquire above.
        // SAFETY: `open` created the array with a first entry. The caller owns the span, which has
        // no objects, or has exclusive access to all arrays. So there is no other reference into
        // the array.
        let len = unsafe { &*pointer }.load(Ordering::Relaxed) as usize + 1;
        // SAFETY: allocated in `open` with this length and swapped out once.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(pointer, len)) });
        // Relaxed: a statistic, which orders no other memory access.
        self.entries.fetch_sub(len as u64, Ordering::Relaxed);
    }

    /// # Safety
    /// The caller must own the span, or hold the lock of an object's slot in it, while it uses the
    /// entry.
    #[inline]
    unsafe fn entry(&self, span: u32, object: usize) -> &AtomicU64 {
        // Acquire: pairs with the Release in `open`.
        let pointer = self.arrays.get(span).load(Ordering::Acquire);
        assert!(!pointer.is_null(), "span {span} has no back-references");
        // Relaxed: constant since `open`; its store is visible after the Acquire above.
        // SAFETY: the first entry exists; the array lives while the caller owns the span, or holds
        // the slot of an object in it.
        let objects = unsafe { &*pointer }.load(Ordering::Relaxed);
        assert!((object as u64) < objects, "object {object} of {objects}");
        // SAFETY: `objects` entries follow the first one, and the array lives as above.
        unsafe { &*pointer.add(object + 1) }
    }

    #[inline]
    pub fn set(&self, span: &OwnedSpan, object: usize, owner: BackRef) {
        freestone_core::trail::step!();
        // SAFETY: the caller owns the span.
        unsafe { self.set_for_object(span.number(), object, owner) };
    }

    /// Sets the owner of an object like [`set`](Self::set), for a caller that does not own the
    /// span.
    ///
    /// # Safety
    /// The caller must have locked the slot that holds the object, or have removed the object from
    /// it without freeing it: then the span cannot become empty.
    #[inline]
    pub unsafe fn set_for_object(&self, span: u32, object: usize, owner: BackRef) {
        // SAFETY: guaranteed by the caller.
        let entry = unsafe { self.entry(span, object) };
        // Relaxed: read by the span's next owner, ordered by the transfer of ownership. A reader
        // that finds the former owner of an object notices that the slot of that owner holds
        // something else.
        entry.store(owner.0, Ordering::Relaxed);
    }

    /// Returns the current or former owner of an object.
    pub fn get(&self, span: &OwnedSpan, object: usize) -> BackRef {
        // SAFETY: the caller owns the span.
        let entry = unsafe { self.entry(span.number(), object) };
        // Relaxed: ordered by the transfer of the span's ownership, see `set_for_object`.
        BackRef(entry.load(Ordering::Relaxed))
    }

    pub fn bytes(&self) -> u64 {
        // Relaxed: a statistic, which orders no other memory access.
        self.entries.load(Ordering::Relaxed) * 8
    }

    /// Returns the size in bytes of the table of arrays, without the arrays.
    pub fn overhead_bytes(&self) -> u64 {
        self.arrays.bytes()
    }
}

impl Drop for BackRefs {
    fn drop(&mut self) {
        for array in self.arrays.iter() {
            self.take(array);
        }
    }
}
