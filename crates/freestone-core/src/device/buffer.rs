//! Memory owned by a device while a submitted request runs.
#![expect(unsafe_code)]
// UNSAFETY: allocates or maps zeroed memory with a larger alignment than Vec supports, and views it as a
// slice.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::{Error, Result};

/// Alignment of every [`IoBuf`] in bytes, suitable for `O_DIRECT`.
pub const IO_ALIGN_BYTES: usize = 4096;
/// Buffers of at least this many bytes are memory mappings: the kernel supplies zeroed pages on first access.
/// The allocator would write zeroes to the whole buffer.
const MAPPED_BYTES: usize = 512 << 10;

/// An owned, initialised, page-aligned buffer.
pub struct IoBuf {
    ptr: NonNull<u8>,
    len: usize,
    /// Size of the allocation in bytes, all initialised. The buffer derefs to the first `len` bytes.
    capacity: usize,
}

// SAFETY: an IoBuf owns its memory exclusively, like Box<[u8]>.
unsafe impl Send for IoBuf {}
// SAFETY: shared references only read.
unsafe impl Sync for IoBuf {}

impl IoBuf {
    /// Returns an empty buffer. Does not allocate.
    pub const fn empty() -> Self {
        Self { ptr: NonNull::dangling(), len: 0, capacity: 0 }
    }

    /// Allocates a buffer of zeroes. If `len` is at least 512 KiB, pages occupy memory from their first
    /// access.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if the host is out of memory.
    pub fn zeroed(len: usize) -> Result<Self> {
        if len == 0 {
            return Ok(Self::empty());
        }
        if len >= MAPPED_BYTES {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: the kernel chooses the address, so no other mapping is replaced.
            let map = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE) };
            let ptr = map.ok().and_then(|at| NonNull::new(at.cast())).ok_or(Error::NoMemory)?;
            return Ok(Self { ptr, len, capacity: len });
        }
        let layout = Layout::from_size_align(len, IO_ALIGN_BYTES).map_err(|_| Error::NoMemory)?;
        // SAFETY: the layout's size is not zero.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(Error::NoMemory)?;
        Ok(Self { ptr, len, capacity: len })
    }

    /// Allocates a copy of `data`.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if the host is out of memory.
    pub fn copy_of(data: &[u8]) -> Result<Self> {
        let mut buf = Self::zeroed(data.len())?;
        buf.copy_from_slice(data);
        Ok(buf)
    }

    /// Returns the size of the allocation in bytes, the maximum for [`set_len`](Self::set_len).
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets the length to `len`, at most the capacity. Bytes beyond the new length keep their content.
    pub fn set_len(&mut self, len: usize) {
        self.len = len.min(self.capacity);
    }
}

impl Drop for IoBuf {
    fn drop(&mut self) {
        if self.capacity >= MAPPED_BYTES {
            // SAFETY: mapped in `zeroed` with this length, and no references into the mapping exist.
            let _ = unsafe { munmap(self.ptr.as_ptr().cast(), self.capacity) };
        } else if self.capacity != 0 {
            // The same layout was valid at the allocation, so this cannot fail.
            if let Ok(layout) = Layout::from_size_align(self.capacity, IO_ALIGN_BYTES) {
                // SAFETY: allocated in `zeroed` with this layout, freed once.
                unsafe { dealloc(self.ptr.as_ptr(), layout) };
            }
        }
    }
}

impl Deref for IoBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` of `capacity` initialised bytes owned by self (or a dangling pointer with
        // len 0).
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for IoBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `len` of `capacity` initialised bytes owned by self (or a dangling pointer with len 0), and
        // `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoBuf({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn buffers_are_zeroed_aligned_and_writable() {
        for len in [1, 4096, MAPPED_BYTES - 1, MAPPED_BYTES, MAPPED_BYTES + 513] {
            let mut buf = IoBuf::zeroed(len).unwrap();
            assert!(buf.as_ptr().addr().is_multiple_of(IO_ALIGN_BYTES), "{len}");
            assert!(buf.len() == len && buf.iter().all(|byte| *byte == 0), "{len}");
            buf.fill(7);
            buf.set_len(1);
            assert_eq!((buf.len(), buf.capacity()), (1, len));
            drop(buf);
            assert_eq!(IoBuf::copy_of(&vec![9; len]).unwrap()[len - 1], 9);
        }
        assert!(matches!(IoBuf::zeroed(usize::MAX / 2), Err(Error::NoMemory)));
    }

    #[test]
    fn large_buffer_allocates_pages_on_first_touch() {
        let mut buf = IoBuf::zeroed(64 << 20).unwrap();
        let page_bytes = rustix::param::page_size();
        // pagemap has 8 bytes for each page; the two highest bits mean "in memory" and "in swap". The memory
        // use of the whole process would include other tests.
        let with_memory = |buf: &IoBuf| {
            let mut entries = vec![0; buf.len() / page_bytes * 8];
            let map = std::fs::File::open("/proc/self/pagemap").unwrap();
            map.read_exact_at(&mut entries, (buf.as_ptr().addr() / page_bytes * 8) as u64).unwrap();
            entries.chunks(8).filter(|entry| entry[7] >> 6 != 0).count()
        };
        assert_eq!(with_memory(&buf), 0);
        buf[5 * page_bytes] = 1;
        assert!((1..=512).contains(&with_memory(&buf)), "one page, at most a huge one");
        buf.fill(1);
        assert_eq!(with_memory(&buf), buf.len() / page_bytes);
    }
}
