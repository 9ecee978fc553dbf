//! The open file: its descriptor, size and capabilities, and a sequence count that orders inline
//! reads against writes.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use rustix::fs::SeekFrom;
use rustix::io::{Errno, ReadWriteFlags};

use freestone_core::device::{Error, Geometry, Result};
use freestone_core::file_locks::{self, Held};
use freestone_core::sync::Arc;

use super::watch::Watched;

/// An open file or block device, shared by the device and its engine.
#[derive(Debug)]
pub(super) struct Backing {
    pub fd: OwnedFd,
    /// Entry in the process's list of open files.
    pub lock_entry: Option<Held>,
    /// Modification time (nanoseconds since 1970) and size in bytes before the file was opened.
    pub modified_at_open: Option<(i128, u64)>,
    /// Watches a read-only file for changes.
    pub watched: Option<Arc<Watched>>,
    pub path: PathBuf,
    pub is_block_device: bool,
    pub direct: bool,
    pub writes: Writes,
    /// Supported `fallocate` modes; cleared when the file system refuses one.
    pub can_punch: AtomicBool,
    pub can_zero_range: AtomicBool,
    /// The file supports `RWF_NOWAIT` reads.
    can_nowait: AtomicBool,
    /// A sync has failed and its data is lost, so no later sync may succeed.
    sync_failed: AtomicBool,
    /// The file may end within a block.
    pub padded: bool,
    /// Bytes of the file that belong to the device; whole blocks, unless `padded`.
    bytes: AtomicU64,
    /// Geometry at opening; size and padding are replaced from `bytes`.
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

    /// Returns the bytes of the device that lie in the file, without the padding.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(SeqCst)
    }

    /// Returns the current length of the file in bytes and picks up growth.
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

    /// Returns the bytes after the device's end, less than a block.
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

    /// Reads cached data at `offset`. Returns the number of bytes, or `None` if the read would
    /// block.
    pub fn read_nowait(&self, offset: u64, out: &mut [u8]) -> Option<u64> {
        if !self.can_nowait.load(SeqCst) {
            return None;
        }
        let mut slices = [IoSliceMut::new(out)];
        match rustix::io::preadv2(&self.fd, &mut slices, offset, ReadWriteFlags::NOWAIT) {
            Ok(n) => Some(n as u64),
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                // tmpfs, for example. Remembered, since another attempt would cost a system call
                // per request.
                self.can_nowait.store(false, SeqCst);
                None
            }
            // Not cached, or an error that the submitted request will see again.
            Err(_) => None,
        }
    }

    /// Records the outcome of a sync. Fails if this or any earlier sync failed.
    pub fn record_sync(&self, outcome: Result<()>) -> Result<()> {
        if outcome.is_err() {
            self.sync_failed.store(true, SeqCst);
        }
        if self.sync_failed.load(SeqCst) { Err(Error::Media) } else { outcome }
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // Closing releases the lock too, but a request that has just ended may keep the file open a
        // little longer.
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

/// A moment at which no write was running: the number of writes begun until then.
#[derive(Debug, Clone, Copy)]
pub(super) struct IdleMark(u64);

impl Writes {
    /// Counts a write. Called before its first system call.
    pub fn begin(&self) {
        self.begun.fetch_add(1, SeqCst);
    }

    /// Counts the end of a write. Called after its last system call, before the completion.
    pub fn end(&self) {
        self.ended.fetch_add(1, SeqCst);
    }

    /// Returns a mark if no write is running.
    pub fn idle_mark(&self) -> Option<IdleMark> {
        // `ended` is read first. Both counters only rise and `ended` never passes `begun`, so equal
        // values mean that no write was running in between (SeqCst keeps this order).
        let ended = self.ended.load(SeqCst);
        (self.begun.load(SeqCst) == ended).then_some(IdleMark(ended))
    }

    /// Returns true if no write has begun since the mark.
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
            zones: None,
        };
        Self::new(fd, PathBuf::from("backing"), false, direct, geometry)
    }
}
