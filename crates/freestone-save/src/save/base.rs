//! Identification of bases, which are not saved.
//!
//! A base is identified by its size and an XXH3 hash (128 bits) of its content. By default only
//! samples are hashed, to avoid reading many gigabytes. Samples cover all of a base of up to 4 MiB.
//! Of a larger base they cover the first MiB, the last 64 KiB, and 512 evenly spread pages.
//! Partition tables and most superblocks are at the beginning, so the samples detect an image that
//! was mounted and written to. They may miss a few bytes patched in the middle;
//! [`BaseCheck::Whole`] detects that.

use std::fmt;
use std::ops::Range;

use xxhash_rust::xxh3::Xxh3;

use freestone_core::PAGE_BYTES;
use freestone_core::device::{Blocking as _, Device, Error, IoBuf, Result};

const PAGE: u64 = PAGE_BYTES as u64;
/// Size in bytes up to which a base is hashed completely.
const SMALL_BYTES: u64 = 4 << 20;
const FIRST_BYTES: u64 = 1 << 20;
const LAST_BYTES: u64 = 64 << 10;
const SAMPLES: u64 = 512;
const READ_BYTES: u64 = 1 << 20;
const _: () = assert!(FIRST_BYTES + LAST_BYTES + SAMPLES * PAGE < SMALL_BYTES);

/// Part of a base's content that is hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BaseCheck {
    /// About 3 MiB of samples; see the module documentation.
    #[default]
    Sampled,
    /// Every byte of the base.
    Whole,
}

/// Identity of a base: its size and a hash of its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BaseIdentity {
    /// Size of the base in bytes.
    pub size: u64,
    /// Part of the content that is hashed.
    pub check: BaseCheck,
    /// XXH3 hash of that part of the content.
    pub hash: u128,
}

impl BaseIdentity {
    /// Reads a device and returns its identity, hashing the part that `check` selects.
    ///
    /// # Errors
    /// Fails if a read of the device fails, or if memory is short.
    pub fn of(device: &dyn Device, check: BaseCheck) -> Result<Self> {
        // The closure never cancels, so the identity is never `None`.
        Self::of_cancellable(device, check, &|| false).and_then(|known| known.ok_or(Error::Gone))
    }

    /// Reads a device like [`of`](Self::of); returns `None` if `cancelled` returned true.
    /// `cancelled` is polled before each MiB.
    ///
    /// # Errors
    /// Fails if a read of the device fails, or if memory is short.
    pub fn of_cancellable(
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
            // Start the end sample at a page boundary, so that only its last page may be partial.
            let last = (size - LAST_BYTES) / PAGE * PAGE;
            let pages = (last - FIRST_BYTES) / PAGE;
            for sample in 0..SAMPLES {
                // The product fits in 64 bits, as a device has less than 2^52 pages.
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
