//! Bases, which are not saved, and how one is known again.
//!
//! A base is known by its size and a hash (XXH3, 128 bits) of its content: of all of it, or, by
//! default, of samples, so that a base of many gigabytes is not read from end to end. Samples are
//! all of a base of up to 4 MiB; of a larger one the first MiB, the last 64 KiB, and 512 pages that
//! are spread evenly. The beginning is where partition tables and most file systems keep what
//! changes with every change (the superblock), so an image that was mounted and written to in
//! between is recognised; one in which a few bytes in the middle were patched may be not.
//! [`BaseCheck::Whole`] does recognise that.

use std::fmt;
use std::ops::Range;

use xxhash_rust::xxh3::Xxh3;

use freestone_core::PAGE_BYTES;
use freestone_core::device::{Blocking as _, Device, Error, IoBuf, Result};

const PAGE: u64 = PAGE_BYTES as u64;
/// Up to this size all is read.
const SMALL_BYTES: u64 = 4 << 20;
const FIRST_BYTES: u64 = 1 << 20;
const LAST_BYTES: u64 = 64 << 10;
const SAMPLES: u64 = 512;
const READ_BYTES: u64 = 1 << 20;
const _: () = assert!(FIRST_BYTES + LAST_BYTES + SAMPLES * PAGE < SMALL_BYTES);

/// How much of a base is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BaseCheck {
    /// Samples, 3 MiB of them; see the module.
    #[default]
    Sampled,
    /// Every byte.
    Whole,
}

/// What a base is known by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BaseIdentity {
    /// Bytes.
    pub size: u64,
    /// What of it the hash is of.
    pub check: BaseCheck,
    /// The hash.
    pub hash: u128,
}

impl BaseIdentity {
    /// Reads what is to be known of a device.
    ///
    /// # Errors
    /// As the device's reads.
    pub fn of(device: &dyn Device, check: BaseCheck) -> Result<Self> {
        // Nobody cancels it.
        Self::of_unless(device, check, &|| false).and_then(|known| known.ok_or(Error::Gone))
    }

    /// The same, or `None` where it was cancelled: asked before each MiB.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn of_unless(
        device: &dyn Device,
        check: BaseCheck,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Self>> {
        let size = device.geometry().size;
        let mut whole = true;
        let mut hash = Xxh3::new();
        let mut buffer = IoBuf::zeroed(READ_BYTES as usize)?;
        let mut add = |range: Range<u64>| -> Result<()> {
            let mut at = range.start;
            while at < range.end {
                whole = whole && !cancelled();
                if !whole {
                    return Ok(());
                }
                let part = &mut buffer[..READ_BYTES.min(range.end - at) as usize];
                device.read_at(at, part)?;
                hash.update(part);
                at += part.len() as u64;
            }
            Ok(())
        };
        if check == BaseCheck::Whole || size <= SMALL_BYTES {
            add(0..size)?;
        } else {
            add(0..FIRST_BYTES)?;
            // Of whole pages, so that the last ones need not be one.
            let last = (size - LAST_BYTES) / PAGE * PAGE;
            let pages = (last - FIRST_BYTES) / PAGE;
            for sample in 0..SAMPLES {
                // The product is below 2^64: a device has less than 2^52 pages.
                let at = FIRST_BYTES + pages * sample / SAMPLES * PAGE;
                add(at..at + PAGE)?;
            }
            add(last..size)?;
        }
        Ok(whole.then(|| Self { size, check, hash: hash.digest128() }))
    }
}

impl fmt::Display for BaseIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = match self.check {
            BaseCheck::Sampled => "",
            BaseCheck::Whole => " of all",
        };
        write!(f, "a device of {} bytes with the hash {:032x}{of}", self.size, self.hash)
    }
}
