//! Root of a page table: an entry for each GiB of the largest possible device. Parts that were never accessed
//! occupy no memory.

#[cfg(loom)]
pub use model::Root;
#[cfg(not(loom))]
pub use real::Root;

#[cfg(not(loom))]
mod real {
    #![expect(unsafe_code)]
    // UNSAFETY: a separate mapping, because an allocator would return 2 MiB of used memory and zero them.

    use std::ops::Deref;
    use std::ptr::NonNull;

    use rustix::mm::{Advice, MapFlags, ProtFlags};

    use crate::device::{Error, Result};
    use crate::sync::AtomicU64;

    /// Top level of a page table: an entry for each directory.
    pub struct Root {
        entries: NonNull<AtomicU64>,
        len: usize,
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
            Ok(Self { entries, len })
        }
    }

    impl Deref for Root {
        type Target = [AtomicU64];

        #[inline]
        fn deref(&self) -> &[AtomicU64] {
            // SAFETY: mapped with this length until the drop, zeroed by the kernel, and page-aligned.
            unsafe { std::slice::from_raw_parts(self.entries.as_ptr(), self.len) }
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
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
    }

    impl Deref for Root {
        type Target = [AtomicU64];

        fn deref(&self) -> &[AtomicU64] {
            &self.0
        }
    }
}
