//! The guest memory of a simulated virtual machine.
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

/// Guest memory in a memfd. Only the ring indices are accessed through the mapping; the rest
/// through the file, so that a truncation does not kill this process.
#[derive(Debug)]
pub struct GuestMemory {
    file: File,
    bytes: u64,
    map: *mut c_void,
}

// SAFETY: the mapping is only accessed through atomics.
unsafe impl Send for GuestMemory {}
// SAFETY: as above.
unsafe impl Sync for GuestMemory {}

/// Returns a new eventfd.
///
/// # Errors
/// Fails if no file descriptor is available.
pub fn new_eventfd() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

impl GuestMemory {
    /// Allocates `bytes` bytes of zeroed guest memory.
    ///
    /// # Errors
    /// Fails if memory or file descriptors are exhausted.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC)?);
        file.set_len(bytes)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of a file with that many bytes.
        let map =
            unsafe { mmap(std::ptr::null_mut(), bytes as usize, access, MapFlags::SHARED, file.as_fd(), 0)? };
        Ok(Self { file, bytes, map })
    }

    /// Returns the size of the memory in bytes, before any truncation.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the memfd, to share the memory with the server.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Truncates the memory to `bytes`. The caller must not access rings in the removed part any
    /// more.
    ///
    /// # Panics
    /// Panics if the file cannot be truncated.
    pub fn truncate(&self, bytes: u64) {
        self.file.set_len(bytes).expect("a file in memory is cut off");
    }

    /// Writes bytes at the offset `at`.
    ///
    /// # Panics
    /// Panics if the bytes do not fit in the memory.
    pub fn put(&self, at: u64, bytes: &[u8]) {
        assert!(at + bytes.len() as u64 <= self.bytes, "outside of the memory");
        self.file.write_all_at(bytes, at).expect("a file in memory is written");
    }

    /// Reads bytes at the offset `at`.
    ///
    /// # Panics
    /// Panics if the memory has fewer bytes.
    pub fn get(&self, at: u64, into: &mut [u8]) {
        self.file.read_exact_at(into, at).expect("a file in memory is read");
    }

    fn at(&self, at: u64) -> &AtomicU16 {
        assert!(at.is_multiple_of(2) && at + 2 <= self.bytes, "no word of the memory");
        // SAFETY: the word is within the mapping and aligned; the other side also accesses it
        // atomically.
        unsafe { AtomicU16::from_ptr(self.map.byte_add(at as usize).cast()) }
    }

    /// Reads a 16-bit number that the server may change. `SeqCst` orders the read after earlier
    /// writes.
    pub fn word(&self, at: u64) -> u16 {
        u16::from_le(self.at(at).load(Ordering::SeqCst))
    }

    /// Writes a 16-bit number that the server reads. Earlier writes become visible to the server
    /// before this one.
    pub fn set_word(&self, at: u64, number: u16) {
        self.at(at).store(number.to_le(), Ordering::SeqCst);
    }
}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        // SAFETY: no reference into the mapping is left.
        let _ = unsafe { munmap(self.map, self.bytes as usize) };
    }
}
