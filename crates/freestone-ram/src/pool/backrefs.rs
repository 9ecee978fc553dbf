//! Back-references: for every object, whose it is. They make objects movable without an
//! indirection.
#![expect(unsafe_code)]
// UNSAFETY: an array a span whose length only the span's class knows, exchanged when the span
// changes class.

use super::span_table::SpanTable;
use super::spans::{Owned, Unused};
use freestone_core::sync::{AtomicPtr, AtomicU64, Ordering};

/// The owner of an object: a table of the family and a slot in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackRef(u64);

const SLOT_BITS: u32 = 36;
const _: () = assert!(freestone_core::slot::MAX_SLOTS <= 1 << SLOT_BITS);
/// Largest table id a back-reference can name.
pub const MAX_TABLE_ID: u32 = (1 << (64 - SLOT_BITS)) - 1;

impl BackRef {
    /// The slot `slot` of table `table`.
    #[inline]
    pub const fn new(table: u32, slot: u64) -> Self {
        debug_assert!(table <= MAX_TABLE_ID && slot < 1 << SLOT_BITS);
        Self((table as u64) << SLOT_BITS | slot)
    }

    /// As one number.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// From [`bits`](Self::bits).
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The table's id.
    pub const fn table(self) -> u32 {
        (self.0 >> SLOT_BITS) as u32
    }

    /// The slot.
    pub const fn slot(self) -> u64 {
        self.0 & ((1 << SLOT_BITS) - 1)
    }
}

/// One array a span. A span's array is made and dropped by the span's owner; an entry is read by
/// the span's owner, and written by it or by whoever has locked the slot that holds the object:
/// while there is one, the span is not dropped.
pub struct BackRefs {
    arrays: SpanTable<AtomicPtr<AtomicU64>>,
    entries: AtomicU64,
}

impl BackRefs {
    pub fn new() -> Self {
        Self { arrays: SpanTable::new(), entries: AtomicU64::new(0) }
    }

    /// Makes the array of a span of `objects` objects, which has just been adopted.
    pub fn open(&self, span: &Owned, objects: u32) {
        // The first entry is the number of the others.
        let entries: Box<[AtomicU64]> =
            std::iter::once(u64::from(objects)).chain((0..objects).map(|_| 0)).map(AtomicU64::new).collect();
        // Relaxed: a statistic.
        self.entries.fetch_add(entries.len() as u64, Ordering::Relaxed);
        // Release: pairs with the Acquire in `entry` and `take`.
        let before =
            self.arrays.get_or_new(span.number()).swap(Box::into_raw(entries).cast(), Ordering::Release);
        debug_assert!(before.is_null(), "{span:?} has back-references already");
    }

    /// Drops the array of a span, in which there is no object.
    pub fn close(&self, span: &Unused) {
        self.take(self.arrays.get(span.number()));
    }

    fn take(&self, array: &AtomicPtr<AtomicU64>) {
        // Acquire: pairs with the Release in `open`.
        let pointer = array.swap(std::ptr::null_mut(), Ordering::Acquire);
        if pointer.is_null() {
            return;
        }
        // Relaxed: constant since `open`, whose store the Acquire above has made visible.
        // SAFETY: `open` made the array with a first entry. The caller owns the span, which has no objects,
        // or has all arrays to itself. So nobody else has a reference into the array.
        let len = unsafe { &*pointer }.load(Ordering::Relaxed) as usize + 1;
        // SAFETY: made in `open` with this length and swapped out once.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(pointer, len)) });
        // Relaxed: a statistic.
        self.entries.fetch_sub(len as u64, Ordering::Relaxed);
    }

    /// # Safety
    /// The caller owns the span, or has locked the slot of an object in it, for as long as it uses
    /// the entry.
    #[inline]
    unsafe fn entry(&self, span: u32, object: usize) -> &AtomicU64 {
        // Acquire: pairs with the Release in `open`.
        let pointer = self.arrays.get(span).load(Ordering::Acquire);
        assert!(!pointer.is_null(), "span {span} has no back-references");
        // Relaxed: constant since `open`, whose store the Acquire above has made visible.
        // SAFETY: the first entry exists; the array lives while the caller owns the span, or holds the
        // slot of an object in it.
        let objects = unsafe { &*pointer }.load(Ordering::Relaxed);
        assert!((object as u64) < objects, "object {object} of {objects}");
        // SAFETY: `objects` entries follow the first one, and the array lives as said above.
        unsafe { &*pointer.add(object + 1) }
    }

    /// Notes whose an object is.
    #[inline]
    pub fn set(&self, span: &Owned, object: usize, owner: BackRef) {
        // SAFETY: the caller owns the span.
        unsafe { self.set_held(span.number(), object, owner) };
    }

    /// As [`set`](Self::set), for who does not own the span.
    ///
    /// # Safety
    /// The caller has locked the slot that holds the object, or has taken the object out of it and
    /// not freed it: the span is not emptied meanwhile.
    #[inline]
    pub unsafe fn set_held(&self, span: u32, object: usize, owner: BackRef) {
        // SAFETY: the caller's promise.
        let entry = unsafe { self.entry(span, object) };
        // Relaxed: read by the span's next owner, which ownership's hand-over orders. Who reads an
        // object's former owner finds that its slot holds something else.
        entry.store(owner.0, Ordering::Relaxed);
    }

    /// Whose an object is, or was.
    pub fn get(&self, span: &Owned, object: usize) -> BackRef {
        // SAFETY: the caller owns the span.
        let entry = unsafe { self.entry(span.number(), object) };
        // Relaxed: see `set_held`.
        BackRef(entry.load(Ordering::Relaxed))
    }

    /// Bytes of all arrays.
    pub fn bytes(&self) -> u64 {
        // Relaxed: a statistic.
        self.entries.load(Ordering::Relaxed) * 8
    }

    /// Bytes of what holds the arrays.
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
