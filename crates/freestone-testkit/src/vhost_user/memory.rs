//! Guest memory.
#![expect(unsafe_code)]
// UNSAFETY: a shared mapping, whose words are only accessed as atomics.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Guest memory in a memfd. All but the ring indices are accessed through the file, so that a
/// truncation does not kill this process.
#[derive(Debug)]
pub struct Memory {
    file: File,
    bytes: u64,
    map: *mut c_void,
}

// SAFETY: the mapping is only accessed through atomics.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// Returns a new eventfd.
///
/// # Errors
/// No file descriptor is available.
pub fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

impl Memory {
    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// Memory or file descriptors are exhausted.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC)?);
        file.set_len(bytes)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of a file with that many bytes.
        let map =
            unsafe { mmap(std::ptr::null_mut(), bytes as usize, access, MapFlags::SHARED, file.as_fd(), 0)? };
        Ok(Self { file, bytes, map })
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the file to share.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Truncates the memory. Rings in the removed part must not be accessed any more.
    ///
    /// # Panics
    /// If the file cannot be truncated.
    pub fn cut(&self, bytes: u64) {
        self.file.set_len(bytes).expect("a file in memory is cut off");
    }

    /// Writes bytes at an offset.
    ///
    /// # Panics
    /// If the bytes exceed the memory.
    pub fn put(&self, at: u64, bytes: &[u8]) {
        assert!(at + bytes.len() as u64 <= self.bytes, "outside of the memory");
        self.file.write_all_at(bytes, at).expect("a file in memory is written");
    }

    /// Reads bytes at an offset.
    ///
    /// # Panics
    /// If the bytes exceed the memory.
    pub fn get(&self, at: u64, into: &mut [u8]) {
        self.file.read_exact_at(into, at).expect("a file in memory is read");
    }

    fn at(&self, at: u64) -> &AtomicU16 {
        assert!(at.is_multiple_of(2) && at + 2 <= self.bytes, "no word of the memory");
        // SAFETY: the word is within the mapping and aligned; the other side also accesses it
        // atomically.
        unsafe { AtomicU16::from_ptr(self.map.byte_add(at as usize).cast()) }
    }

    /// Reads a number that the other side may change. `SeqCst` orders it with the words written
    /// before.
    pub fn word(&self, at: u64) -> u16 {
        u16::from_le(self.at(at).load(Ordering::SeqCst))
    }

    /// Writes a number that the other side reads; earlier writes become visible with it.
    pub fn set_word(&self, at: u64, number: u16) {
        self.at(at).store(number.to_le(), Ordering::SeqCst);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: no reference into the mapping is left.
        let _ = unsafe { munmap(self.map, self.bytes as usize) };
    }
}
