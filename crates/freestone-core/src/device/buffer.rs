//! Memory that a device owns while a submitted request runs.
#![expect(unsafe_code)]
// UNSAFETY: allocates zeroed memory with an alignment of its own, which Vec cannot, and views it as
// a slice.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use super::{Error, Result};

/// Every [`IoBuf`] begins at a multiple of this many bytes, so that it fits `O_DIRECT`.
pub const IO_ALIGN_BYTES: usize = 4096;

/// An owned, initialised, page-aligned buffer.
pub struct IoBuf {
    ptr: NonNull<u8>,
    len: usize,
    /// Bytes of the allocation, all initialised; `len` of them are shown.
    capacity: usize,
}

// SAFETY: an IoBuf owns its memory exclusively, like Box<[u8]>.
unsafe impl Send for IoBuf {}
// SAFETY: shared references only read.
unsafe impl Sync for IoBuf {}

impl IoBuf {
    /// An empty buffer; allocates nothing.
    pub const fn empty() -> Self {
        Self { ptr: NonNull::dangling(), len: 0, capacity: 0 }
    }

    /// A buffer of `len` zeroes.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub fn zeroed(len: usize) -> Result<Self> {
        if len == 0 {
            return Ok(Self::empty());
        }
        let layout = Layout::from_size_align(len, IO_ALIGN_BYTES).map_err(|_| Error::NoMemory)?;
        // SAFETY: the layout's size is not zero.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(Error::NoMemory)?;
        Ok(Self { ptr, len, capacity: len })
    }

    /// A copy of `data`.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub fn copy_of(data: &[u8]) -> Result<Self> {
        let mut buf = Self::zeroed(data.len())?;
        buf.copy_from_slice(data);
        Ok(buf)
    }

    /// Bytes of the memory, of which [`show`](Self::show) can show as many.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Shows the first `len` bytes of the memory, at most what was allocated. What was hidden keeps
    /// its content.
    pub fn show(&mut self, len: usize) {
        self.len = len.min(self.capacity);
    }
}

impl Drop for IoBuf {
    fn drop(&mut self) {
        if self.capacity != 0 {
            // The layout was valid when the buffer was made.
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
        // SAFETY: as in deref, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoBuf({} bytes)", self.len)
    }
}
