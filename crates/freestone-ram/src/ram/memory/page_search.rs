//! Search for pages that evictions and recompression select: leaf by leaf, or largest objects
//! first.
//!
//! The search reads slot words without locks. The caller must check each candidate again under its
//! slot's lock.

use std::ops::RangeInclusive;

use super::layer::Layer;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Error, Result};
use freestone_core::slot::{Kind, LEAF_SLOTS, LOCATION_BITS, MAX_SLOTS, Word};

/// Width in bytes of the buckets that sort objects by size, as in the kernel.
const BUCKET_BYTES: usize = 64;
const BUCKETS: usize = PAGE_BYTES / BUCKET_BYTES + 1;
/// Maximum slots listed at once for a largest-first visit. The list takes 8 MiB of memory.
const WINDOW_SLOTS: usize = if cfg!(test) { 100 } else { 1 << 20 };
const SLOT_MASK: u64 = (1 << LOCATION_BITS) - 1;
const _: () = assert!(MAX_SLOTS - 1 <= SLOT_MASK && BUCKETS < 1 << (64 - LOCATION_BITS));

/// Number of candidates in each bucket of object sizes.
pub(in crate::ram) struct Sizes([usize; BUCKETS]);

impl Default for Sizes {
    fn default() -> Self {
        Self([0; BUCKETS])
    }
}

impl Sizes {
    pub fn count(&mut self, word: Word) {
        self.0[bucket(word)] += 1;
    }
}

fn bucket(word: Word) -> usize {
    word.memory_bytes() / BUCKET_BYTES
}

/// Returns true if the page can be written back: it is compressed, alone or in a group, or huge.
/// Pages that repeat a pattern take too little memory.
#[inline]
pub(in crate::ram) fn is_spillable(word: Word) -> bool {
    matches!(word.kind(), Kind::Compressed | Kind::Huge | Kind::Grouped)
}

/// Returns true if the slot has the page in an object of its own: the page is compressed, not in a
/// group, or huge.
#[inline]
pub(in crate::ram) fn has_own_object(word: Word) -> bool {
    matches!(word.kind(), Kind::Compressed | Kind::Huge)
}

impl Layer {
    /// Visits the slots in `ranges` whose word is `wanted`, read without locks, until `visit`
    /// returns false.
    pub(in crate::ram) fn for_each_candidate(
        &self,
        ranges: &[RangeInclusive<u64>],
        wanted: &impl Fn(Word) -> bool,
        mut visit: impl FnMut(u64, Word) -> bool,
    ) {
        let mut found = Vec::with_capacity(LEAF_SLOTS as usize);
        for range in ranges {
            let mut from = *range.start();
            while let Some(next) = self.peek_leaf(from, *range.end(), wanted, &mut found) {
                from = next;
                if !found.iter().all(|&(slot, word)| visit(slot, word)) {
                    return;
                }
            }
        }
    }

    /// Visits the slots in `ranges` whose word is `wanted`, until `visit` returns false: largest
    /// objects first, then in order of address. `sizes` must have the counts of these slots. The
    /// list of slots has a bounded size and is rebuilt for the next smaller objects.
    ///
    /// # Errors
    /// Fails with [`Error::NoMemory`] if the list of slots cannot be allocated.
    pub(in crate::ram) fn largest_first(
        &self,
        sizes: &Sizes,
        ranges: &[RangeInclusive<u64>],
        wanted: &impl Fn(Word) -> bool,
        mut visit: impl FnMut(u64) -> bool,
    ) -> Result<()> {
        let mut window = Vec::new();
        window
            .try_reserve_exact(sizes.0.iter().sum::<usize>().min(WINDOW_SLOTS))
            .map_err(|_| Error::NoMemory)?;
        let mut top = BUCKETS;
        while top > 0 {
            // List as many buckets, from the largest size down, as fit the window, at least one.
            let mut bottom = top - 1;
            let mut slots = sizes.0[bottom];
            while bottom > 0 && slots + sizes.0[bottom - 1] <= WINDOW_SLOTS {
                bottom -= 1;
                slots += sizes.0[bottom];
            }
            // The loop repeats only if a single bucket exceeds the window, or has grown since it
            // was counted.
            let mut from = if slots > 0 { Some((0, 0)) } else { None };
            while let Some((range, slot)) = from.take() {
                window.clear();
                for (index, slots) in ranges.iter().enumerate().skip(range) {
                    let begin = if index == range { slot.max(*slots.start()) } else { *slots.start() };
                    self.for_each_candidate(&[begin..=*slots.end()], wanted, |slot, word| {
                        let bucket = bucket(word);
                        if !(bottom..top).contains(&bucket) {
                            return true;
                        }
                        if window.len() == window.capacity() {
                            from = Some((index, slot));
                            return false;
                        }
                        window.push(((BUCKETS - bucket) as u64) << LOCATION_BITS | slot);
                        true
                    });
                    if from.is_some() {
                        break;
                    }
                }
                window.sort_unstable();
                if !window.iter().all(|entry| visit(entry & SLOT_MASK)) {
                    return Ok(());
                }
            }
            top = bottom;
        }
        Ok(())
    }

    /// Replaces `found` with the slots of the first leaf at or after slot `from` whose word is
    /// `wanted`. Returns the first slot of the next leaf, or `None` if no leaf is left up to slot
    /// `last`.
    pub(in crate::ram) fn peek_leaf(
        &self,
        from: u64,
        last: u64,
        wanted: &impl Fn(Word) -> bool,
        found: &mut Vec<(u64, Word)>,
    ) -> Option<u64> {
        found.clear();
        let present = self.table().next_present(from, last.checked_add(1)?)?;
        let leaf = self.table().leaf(present)?;
        let next = (present | (LEAF_SLOTS - 1)) + 1;
        for slot in present..next.min(last + 1) {
            let word = leaf.peek(slot);
            if wanted(word) {
                found.push((slot, word));
            }
        }
        Some(next)
    }
}
