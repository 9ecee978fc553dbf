//! Units of RAM disks: pages and logical blocks, and the pieces of a byte range in them.

use freestone_core::PAGE_BYTES;
use freestone_core::slot::MAX_SLOTS;

/// Logical block size in bytes: the smallest request. A page has eight logical blocks.
pub(in crate::ram) const LOGICAL_BLOCK_BYTES: u32 = 512;
pub(in crate::ram) const PAGE: u64 = PAGE_BYTES as u64;

/// Largest disk in bytes: 256 TiB, as many pages as a slot table can address.
pub const DISKSIZE_BYTES_MAX: u64 = MAX_SLOTS * PAGE;
const _: () = assert!(DISKSIZE_BYTES_MAX == 256 << 40, "SetupError::TooLarge says 256 TiB");

/// Returns the first multiple of `unit` above `at`. `unit` must be a power of two.
pub(in crate::ram) fn next_multiple(at: u64, unit: u64) -> u64 {
    (at | (unit - 1)) + 1
}

/// Returns the part of the byte range `[at, at + len)` in the range's first page: slot, first byte
/// within the page, and length.
#[inline]
pub(in crate::ram) fn piece(at: u64, len: u64) -> (u64, usize, usize) {
    let from = at % PAGE;
    (at / PAGE, from as usize, (PAGE - from).min(len) as usize)
}
