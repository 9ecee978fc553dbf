//! Anonymous mappings whose pages can be returned to the kernel while the mapping is kept.
#![expect(unsafe_code)]
// UNSAFETY: maps anonymous memory and views a part of it as a slice.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::PAGE_BYTES;

/// A zeroed byte buffer in its own memory mapping, because an allocator would keep freed pages.
#[derive(Debug)]
pub struct MappedBuffer {
    map: NonNull<u8>,
    map_len: usize,
    /// Address of the first byte of the slice. The slice ends with the mapping.
    from: NonNull<u8>,
    len: usize,
}

// SAFETY: a MappedBuffer owns its memory exclusively, like Box<[u8]>.
unsafe impl Send for MappedBuffer {}
// SAFETY: shared references only read.
unsafe impl Sync for MappedBuffer {}

impl MappedBuffer {
    /// Maps `len` zero bytes such that byte `aligned` is page-aligned.
    ///
    /// # Errors
    /// Errors of `mmap(2)`: no memory, or too many mappings.
    pub fn new(len: usize, aligned: usize) -> io::Result<Self> {
        let lead = (PAGE_BYTES - aligned % PAGE_BYTES) % PAGE_BYTES;
        let map_len = (lead + len).max(1);
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: the kernel chooses the address, so no other mapping is replaced.
        let map = unsafe { mmap_anonymous(std::ptr::null_mut(), map_len, protection, flags) }?;
        let Some(map) = NonNull::new(map.cast::<u8>()) else { return Err(io::ErrorKind::OutOfMemory.into()) };
        // SAFETY: `lead` is at most the mapping's length.
        let from = unsafe { map.add(lead) };
        Ok(Self { map, map_len, from, len })
    }

    /// Zeroes the buffer and releases its pages to the kernel.
    pub fn clear(&mut self) {
        // SAFETY: the mapping is private, anonymous and exclusively owned; its pages then read as zeroes.
        let cleared = unsafe { madvise(self.map.as_ptr().cast(), self.map_len, Advice::LinuxDontNeed) };
        if cleared.is_err() {
            self.fill(0);
        }
    }
}

impl Drop for MappedBuffer {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length and unmapped once. On failure the mapping leaks.
        let _ = unsafe { munmap(self.map.as_ptr().cast(), self.map_len) };
    }
}

impl Deref for MappedBuffer {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping holds `len` initialised bytes from `from` on.
        unsafe { std::slice::from_raw_parts(self.from.as_ptr(), self.len) }
    }
}

impl DerefMut for MappedBuffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping holds `len` initialised bytes from `from` on, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.from.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_byte_is_page_aligned() {
        for aligned in [0, 28, PAGE_BYTES, PAGE_BYTES + 1] {
            let mapped = MappedBuffer::new(3 * PAGE_BYTES, aligned).unwrap();
            assert_eq!(mapped.len(), 3 * PAGE_BYTES);
            assert!(mapped[aligned..].as_ptr().addr().is_multiple_of(PAGE_BYTES));
            assert!(mapped.iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn cleared_buffer_reads_as_zeroes() {
        let mut mapped = MappedBuffer::new(PAGE_BYTES + 1, 28).unwrap();
        mapped.fill(1);
        mapped.clear();
        assert!(mapped.iter().all(|byte| *byte == 0));
        mapped.fill(2);
    }
}
