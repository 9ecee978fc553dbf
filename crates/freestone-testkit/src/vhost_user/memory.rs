//! The memory of a machine.
#![expect(unsafe_code)]
// UNSAFETY: a mapping, in which the words that both sides look at are read and written as a whole.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A file in memory. All but the indices of rings goes through the file, so one that was cut off
/// does not end the process that has cut it off.
#[derive(Debug)]
pub struct Memory {
    file: File,
    bytes: u64,
    map: *mut c_void,
}

// SAFETY: the mapping is only used through atomics.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// An eventfd.
///
/// # Errors
/// No descriptor is left.
pub fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

impl Memory {
    /// So many bytes of zeroes.
    ///
    /// # Errors
    /// No memory or no descriptor is left.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC)?);
        file.set_len(bytes)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a mapping of its own, of a file that has as many bytes.
        let map =
            unsafe { mmap(std::ptr::null_mut(), bytes as usize, access, MapFlags::SHARED, file.as_fd(), 0)? };
        Ok(Self { file, bytes, map })
    }

    /// How large it is.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The file that is shared.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Leaves only so many bytes. Rings that are cut off must not be looked at any more.
    ///
    /// # Panics
    /// When a file in memory cannot be cut off.
    pub fn cut(&self, bytes: u64) {
        self.file.set_len(bytes).expect("a file in memory is cut off");
    }

    /// Writes these bytes.
    ///
    /// # Panics
    /// When they are not in the memory.
    pub fn put(&self, at: u64, bytes: &[u8]) {
        assert!(at + bytes.len() as u64 <= self.bytes, "outside of the memory");
        self.file.write_all_at(bytes, at).expect("a file in memory is written");
    }

    /// Fills `into`.
    ///
    /// # Panics
    /// When the memory ends before it.
    pub fn get(&self, at: u64, into: &mut [u8]) {
        self.file.read_exact_at(into, at).expect("a file in memory is read");
    }

    fn at(&self, at: u64) -> &AtomicU16 {
        assert!(at.is_multiple_of(2) && at + 2 <= self.bytes, "no word of the memory");
        // SAFETY: it is in the mapping, and aligned; others change it only as a whole.
        unsafe { AtomicU16::from_ptr(self.map.byte_add(at as usize).cast()) }
    }

    /// A number that the other side may change.
    pub fn word(&self, at: u64) -> u16 {
        u16::from_le(self.at(at).load(Ordering::SeqCst))
    }

    /// Writes a number that the other side looks at; what was put before is seen with it.
    pub fn set_word(&self, at: u64, number: u16) {
        self.at(at).store(number.to_le(), Ordering::SeqCst);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: nobody has a reference into it any more.
        let _ = unsafe { munmap(self.map, self.bytes as usize) };
    }
}
