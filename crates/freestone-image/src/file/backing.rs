//! The open image file: its descriptor, size and capabilities, and a sequence count that detects
//! writes concurrent with inline reads.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use rustix::fs::SeekFrom;
use rustix::io::{Errno, ReadWriteFlags};

use freestone_core::device::{Error, Geometry, Result};
use freestone_core::file_locks::{self, FileRegistration};
use freestone_core::sync::Arc;

use super::watch::FileWatch;

/// An open file or block device, shared by the [`File`](super::File) and its I/O engine.
#[derive(Debug)]
pub(super) struct Backing {
    pub fd: OwnedFd,
    /// Registration of the file in this process's table of open files.
    pub lock_entry: Option<FileRegistration>,
    /// Modification time (nanoseconds since 1970) and size in bytes of the file before it was
    /// opened.
    pub modified_at_open: Option<(i128, u64)>,
    /// Watch that detects changes of a read-only file; `None` for a writable file.
    pub watched: Option<Arc<FileWatch>>,
    pub path: PathBuf,
    pub is_block_device: bool,
    pub direct: bool,
    pub writes: Writes,
    /// True if this `fallocate` mode can be used; cleared when the file system refuses the mode.
    pub can_punch: AtomicBool,
    pub can_zero_range: AtomicBool,
    /// True if reads can use `RWF_NOWAIT`: with the page cache, until the file system refuses one.
    can_nowait: AtomicBool,
    /// True after a failed sync, whose data is lost. No later sync may succeed.
    sync_failed: AtomicBool,
    /// True if the file may end within a block; the last block is then padded.
    pub padded: bool,
    /// Bytes of the file that belong to the device: whole blocks, unless `padded`.
    bytes: AtomicU64,
    /// Geometry at opening. [`geometry`](Self::geometry) computes size and padding from `bytes`.
    geometry: Geometry,
}

impl Backing {
    pub fn new(fd: OwnedFd, path: PathBuf, is_block_device: bool, direct: bool, geometry: Geometry) -> Self {
        Self {
            fd,
            lock_entry: None,
            modified_at_open: None,
            watched: None,
            path,
            is_block_device,
            direct,
            writes: Writes::default(),
            can_punch: AtomicBool::new(geometry.discard_granularity > 0),
            can_zero_range: AtomicBool::new(true),
            can_nowait: AtomicBool::new(!direct),
            sync_failed: AtomicBool::new(false),
            padded: false,
            bytes: AtomicU64::new(geometry.size - u64::from(geometry.padding)),
            geometry,
        }
    }

    pub fn geometry(&self) -> Geometry {
        let bytes = self.bytes();
        let size = bytes.next_multiple_of(self.geometry.logical_block.into());
        Geometry { size, padding: (size - bytes) as u32, ..self.geometry }
    }

    /// Returns the size of the device in bytes, without the padding that is not in the file.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(SeqCst)
    }

    /// Returns the current length of the file in bytes, and adds growth of the file to the device.
    pub fn refresh(&self) -> Result<u64> {
        let real = if self.is_block_device {
            rustix::fs::seek(&self.fd, SeekFrom::End(0)).map_err(error)?
        } else {
            u64::try_from(rustix::fs::fstat(&self.fd).map_err(error)?.st_size).unwrap_or(0)
        };
        let partial = if self.padded { 0 } else { real % u64::from(self.geometry.logical_block) };
        self.bytes.fetch_max(real - partial, SeqCst);
        Ok(real)
    }

    /// Returns the bytes of the file after the device's end, less than a block.
    pub fn tail(&self) -> io::Result<Vec<u8>> {
        let geometry = self.geometry();
        let mut tail = vec![0; geometry.logical_block as usize - 1];
        let mut found = 0;
        while !self.is_block_device && found < tail.len() {
            match rustix::io::pread(&self.fd, &mut tail[found..], geometry.size + found as u64)? {
                0 => break,
                n => found += n,
            }
        }
        tail.truncate(found);
        Ok(tail)
    }

    /// Reads data at `offset` that is in the page cache. Returns the number of bytes read, or
    /// `None` if the read would block or failed.
    pub fn read_nowait(&self, offset: u64, out: &mut [u8]) -> Option<u64> {
        if !self.can_nowait.load(SeqCst) {
            return None;
        }
        let mut slices = [IoSliceMut::new(out)];
        match rustix::io::preadv2(&self.fd, &mut slices, offset, ReadWriteFlags::NOWAIT) {
            Ok(n) => Some(n as u64),
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                // Some file systems, for example tmpfs. Remember it, since each further attempt
                // would cost a system call.
                self.can_nowait.store(false, SeqCst);
                None
            }
            // The data is not cached, or there is an error that the submitted request will return.
            Err(_) => None,
        }
    }

    /// Records the result of a sync. Fails if this sync or any earlier one failed.
    pub fn record_sync(&self, outcome: Result<()>) -> Result<()> {
        if outcome.is_err() {
            self.sync_failed.store(true, SeqCst);
        }
        if self.sync_failed.load(SeqCst) { Err(Error::Media) } else { outcome }
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // Closing the file releases its lock, too. But a request that has just ended may keep the
        // file open a little longer, so unlock it now.
        file_locks::unlock(self.fd.as_fd());
    }
}

/// Counts writes, so that an inline read can detect a concurrent write. Works like a seqlock whose
/// readers never wait.
#[derive(Debug, Default)]
pub(super) struct Writes {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// Number of writes begun until a moment at which no write was in progress.
#[derive(Debug, Clone, Copy)]
pub(super) struct IdleMark(u64);

impl Writes {
    /// Counts the begin of a write. Called before the first system call of the write.
    pub fn begin(&self) {
        self.begun.fetch_add(1, SeqCst);
    }

    /// Counts the end of a write. Called after the last system call of the write, before its
    /// completion.
    pub fn end(&self) {
        self.ended.fetch_add(1, SeqCst);
    }

    /// Returns a mark for [`is_unchanged_since`](Self::is_unchanged_since); `None` if a write is in
    /// progress.
    pub fn idle_mark(&self) -> Option<IdleMark> {
        // `ended` is read first. Both counters only rise, and `ended` never exceeds `begun`. So
        // equal values mean that no write was in progress between the two loads (SeqCst keeps their
        // order).
        let ended = self.ended.load(SeqCst);
        (self.begun.load(SeqCst) == ended).then_some(IdleMark(ended))
    }

    /// Returns true if no write has begun since `idle_mark`.
    pub fn is_unchanged_since(&self, idle_mark: IdleMark) -> bool {
        self.begun.load(SeqCst) == idle_mark.0
    }
}

pub(super) fn error(errno: Errno) -> Error {
    match errno {
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => Error::NoSpace,
        Errno::NOMEM | Errno::NOBUFS => Error::NoMemory,
        Errno::NODEV | Errno::NXIO => Error::Gone,
        Errno::ROFS | Errno::PERM => Error::ReadOnly,
        Errno::OPNOTSUPP => Error::Unsupported,
        _ => Error::Media,
    }
}

#[cfg(test)]
impl Backing {
    pub fn in_memory(size: u64, direct: bool) -> Self {
        let fd = rustix::fs::memfd_create("backing", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, size).unwrap();
        let geometry = Geometry {
            size,
            logical_block: 512,
            physical_block: 4096,
            io_min: 4096,
            io_opt: 4096,
            discard_granularity: 4096,
            fast_zeroes: true,
            volatile_cache: true,
            padding: 0,
            volatile_media: false,
            rotational: false,
            max_request: 0,
            read_only: false,
            ignores_data: false,
            zones: None,
        };
        Self::new(fd, PathBuf::from("backing"), false, direct, geometry)
    }
}
