//! Freestone: virtual block devices whose locks are as fine as one page, one chunk or one zone.
//!
//! Start with [`device`], the contract between devices and exports; [`ram`] is the compressed RAM disk.

// Offsets and lengths are cast between u64 and usize all over.
const _: () = assert!(usize::BITS == 64, "Freestone needs a 64-bit machine");

pub mod device;
