//! Root of a page table: an entry for each GiB of the largest possible device. Parts that were never accessed
//! occupy no memory.

#[cfg(loom)]
pub use model::{Record, Root, Roots};
#[cfg(not(loom))]
pub use real::{RECORD_WORDS, Record, Root, Roots};

#[cfg(not(loom))]
mod real {
    #![expect(unsafe_code)]
    // UNSAFETY: a separate mapping, because an allocator would return 2 MiB of used memory and zero them.

    use std::ops::{Deref, Range};
    use std::ptr::NonNull;

    use rustix::mm::{Advice, MapFlags, ProtFlags};

    use crate::arena::Arena;
    use crate::device::{Error, Result};
    use crate::sync::{AtomicU64, Ordering};

    /// Number of words of a record.
    pub const RECORD_WORDS: usize = 8;
    /// Bytes from one root in a file to the next: a record, and 2 MiB of entries. The rest is a hole.
    const UNIT_BYTES: u64 = 4 << 20;
    const RECORD_BYTES: u64 = 8 * RECORD_WORDS as u64;

    /// Words at the begin of a root in a file, in which the owner of the table records what it is. While the
    /// first word is 0, the root is unused.
    pub type Record = [AtomicU64; RECORD_WORDS];

    /// Top level of a page table: an entry for each directory.
    pub struct Root {
        entries: NonNull<AtomicU64>,
        len: usize,
        /// Number of the root in the file of [`Roots`]; `None` if it is a mapping of its own.
        unit: Option<u32>,
    }

    impl Root {
        /// Maps a root of `len` zero entries.
        pub fn new(len: usize) -> Result<Self> {
            let bytes = len.checked_mul(size_of::<AtomicU64>()).ok_or(Error::NoMemory)?;
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            // SAFETY: the kernel chooses the address, so no other mapping is replaced.
            let address = unsafe {
                rustix::mm::mmap_anonymous(
                    std::ptr::null_mut(),
                    bytes,
                    ProtFlags::READ | ProtFlags::WRITE,
                    flags,
                )
            };
            let address = address.map_err(|_| Error::NoMemory)?;
            // A touched entry must not allocate a huge page. Kernels without huge pages reject the advice,
            // which is then unnecessary.
            // SAFETY: the range was just mapped; the advice changes no content.
            let _ = unsafe { rustix::mm::madvise(address, bytes, Advice::LinuxNoHugepage) };
            let entries = NonNull::new(address.cast()).ok_or(Error::NoMemory)?;
            Ok(Self { entries, len, unit: None })
        }

        /// Returns the number of the root in its file; `None` if it is not in one.
        pub const fn unit(&self) -> Option<u32> {
            self.unit
        }
    }

    impl Deref for Root {
        type Target = [AtomicU64];

        #[inline]
        fn deref(&self) -> &[AtomicU64] {
            // SAFETY: mapped with this length until the drop, zeroed by the kernel, and aligned. A table
            // keeps the file of its root mapped.
            unsafe { std::slice::from_raw_parts(self.entries.as_ptr(), self.len) }
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            if self.unit.is_some() {
                return;
            }
            // SAFETY: mapped in `new` with this length; no borrows exist.
            let unmapped = unsafe {
                rustix::mm::munmap(self.entries.as_ptr().cast(), self.len * size_of::<AtomicU64>())
            };
            debug_assert!(unmapped.is_ok(), "{unmapped:?}");
        }
    }

    // SAFETY: Root owns its mapping and hands out only shared references to atomics.
    unsafe impl Send for Root {}
    // SAFETY: Root owns its mapping and hands out only shared references to atomics.
    unsafe impl Sync for Root {}

    /// Roots in a file, which another process can [adopt](crate::slot::adoption).
    pub struct Roots(Arena);

    impl Roots {
        /// Creates an empty file.
        ///
        /// # Errors
        /// Errors of `memfd_create(2)`.
        pub fn new() -> rustix::io::Result<Self> {
            Ok(Self(Arena::new("freestone-roots", UNIT_BYTES)?))
        }

        /// Returns the roots of another process, which has ended.
        ///
        /// # Errors
        /// As [`Arena::adopt`].
        pub fn adopt(file: std::os::fd::OwnedFd) -> rustix::io::Result<Self> {
            Ok(Self(Arena::adopt(file, UNIT_BYTES)?))
        }

        pub const fn arena(&self) -> &Arena {
            &self.0
        }

        /// Allocates a root of `len` zero entries. The caller frees it with [`free`](Self::free).
        pub fn alloc(&self, len: usize) -> Result<Root> {
            // The memory of the record and of the first entries exists from now on; a fault could not report
            // that the system has none.
            let unit = self.0.alloc_populated(crate::PAGE_BYTES as u64)?;
            Ok(self.root(unit, len))
        }

        /// Returns the numbers of the roots with memory, in ascending order. An access to another root would
        /// allocate memory.
        ///
        /// # Errors
        /// Errors of `lseek(2)`.
        pub fn present(&self) -> rustix::io::Result<Vec<u32>> {
            let end = u64::from(self.0.units_ever_allocated()) * UNIT_BYTES;
            let units = self.0.data_in(0..end)?.into_iter().flat_map(|data| {
                let (first, last) = (data.start / UNIT_BYTES, (data.end - 1) / UNIT_BYTES);
                first as u32..=last as u32
            });
            let mut units: Vec<u32> = units.collect();
            units.dedup();
            Ok(units)
        }

        /// Returns the ranges of a root's entries that have memory.
        ///
        /// # Errors
        /// Errors of `lseek(2)`.
        pub fn present_entries(&self, unit: u32, len: usize) -> rustix::io::Result<Vec<Range<usize>>> {
            let start = u64::from(unit) * UNIT_BYTES;
            let data = self.0.data_in(start..start + UNIT_BYTES)?;
            // A byte of the file belongs to an entry, or before the first one to the record.
            let entry = |at: u64| ((at - start).saturating_sub(RECORD_BYTES) / 8).min(len as u64) as usize;
            Ok(data.into_iter().map(|data| entry(data.start)..entry(data.end)).collect())
        }

        /// Returns the root with this number, which the caller owns.
        pub fn root(&self, unit: u32, len: usize) -> Root {
            assert!(RECORD_BYTES + len as u64 * 8 <= UNIT_BYTES);
            let entries = self.0.at(u64::from(unit) * UNIT_BYTES + RECORD_BYTES).cast();
            Root { entries, len, unit: Some(unit) }
        }

        /// Returns the record of a root.
        pub fn record(&self, unit: u32) -> &Record {
            let address = self.0.at(u64::from(unit) * UNIT_BYTES).cast::<Record>();
            // SAFETY: mapped and aligned, accessed only as atomics; it lives as long as the arena.
            unsafe { address.as_ref() }
        }

        /// Frees all roots but `used`, in ascending order.
        ///
        /// # Errors
        /// As [`Arena::keep_units`].
        pub fn keep(&self, used: &[u32]) -> Result<()> {
            // SAFETY: roots are accessed only as atomics.
            unsafe { self.0.keep_units(used) }
        }

        /// Frees a root, whose nodes no table uses any more.
        pub fn free(&self, unit: u32) {
            // Release: an adopting process finds the root unused before its entries are gone.
            self.record(unit)[0].store(0, Ordering::Release);
            let at = u64::from(unit) * UNIT_BYTES;
            // SAFETY: roots are accessed only as atomics.
            unsafe { self.0.release(at, UNIT_BYTES) };
            // SAFETY: roots are accessed only as atomics, so a wrong number corrupts a table but not memory
            // safety.
            unsafe { self.0.free(unit) };
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// If the size in bytes wrapped, the mapping would be shorter than its slice.
        #[test]
        fn new_rejects_overflowing_size() {
            assert!(Root::new(usize::MAX / size_of::<AtomicU64>() + 2).is_err());
        }
    }
}

#[cfg(loom)]
mod model {
    use std::ops::Deref;

    use crate::device::Result;
    use crate::sync::AtomicU64;

    /// Top level of a page table: an entry for each directory.
    pub struct Root(Box<[AtomicU64]>);

    impl Root {
        pub fn new(len: usize) -> Result<Self> {
            Ok(Self((0..len).map(|_| AtomicU64::new(0)).collect()))
        }

        pub const fn unit(&self) -> Option<u32> {
            None
        }
    }

    pub type Record = [AtomicU64; 8];

    /// Models have no roots in files.
    pub enum Roots {}

    impl Roots {
        pub fn alloc(&self, _: usize) -> Result<Root> {
            match *self {}
        }

        pub fn record(&self, _: u32) -> &Record {
            match *self {}
        }

        pub fn free(&self, _: u32) {
            match *self {}
        }
    }

    impl Deref for Root {
        type Target = [AtomicU64];

        fn deref(&self) -> &[AtomicU64] {
            &self.0
        }
    }
}
