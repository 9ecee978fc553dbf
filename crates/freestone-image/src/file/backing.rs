//! The open file: what is known of it, and the order between inline reads and writes.

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

/// An open file or block device. Shared by the device and its engine.
#[derive(Debug)]
pub(super) struct Backing {
    pub fd: OwnedFd,
    /// In the list of this process; dropped with the file.
    pub held: Option<Held>,
    /// When it was modified last before it was opened, and its size then.
    pub found: Option<(i128, u64)>,
    /// Of a file that is only read.
    pub watched: Option<Arc<Watched>>,
    pub path: PathBuf,
    pub is_block_device: bool,
    pub direct: bool,
    pub writes: Writes,
    /// What can be asked of `fallocate`; cleared when the file system refuses.
    pub can_punch: AtomicBool,
    pub can_zero_range: AtomicBool,
    /// `RWF_NOWAIT` reads work here.
    can_nowait: AtomicBool,
    /// A sync has failed: what it covered is lost, so no later one may claim success.
    sync_failed: AtomicBool,
    /// It may end within a block.
    pub padded: bool,
    /// Bytes of the file that are the device's; whole blocks, unless `padded`.
    bytes: AtomicU64,
    /// All but the size.
    geometry: Geometry,
}

impl Backing {
    pub fn new(fd: OwnedFd, path: PathBuf, is_block_device: bool, direct: bool, geometry: Geometry) -> Self {
        Self {
            fd,
            held: None,
            found: None,
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

    /// What of the device lies in the file; the padding does not.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(SeqCst)
    }

    /// Bytes that the file really has at this moment. Takes growth over.
    pub fn refresh(&self) -> Result<u64> {
        let real = if self.is_block_device {
            rustix::fs::seek(&self.fd, SeekFrom::End(0)).map_err(error)?
        } else {
            u64::try_from(rustix::fs::fstat(&self.fd).map_err(error)?.st_size).unwrap_or(0)
        };
        let behind = if self.padded { 0 } else { real % u64::from(self.geometry.logical_block) };
        self.bytes.fetch_max(real - behind, SeqCst);
        Ok(real)
    }

    /// What the file has at this moment behind the device's end, less than a block.
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

    /// What lies at `offset` in the page cache; `None` where it would have to be waited for.
    pub fn read_nowait(&self, offset: u64, out: &mut [u8]) -> Option<u64> {
        if !self.can_nowait.load(SeqCst) {
            return None;
        }
        let mut slices = [IoSliceMut::new(out)];
        match rustix::io::preadv2(&self.fd, &mut slices, offset, ReadWriteFlags::NOWAIT) {
            Ok(n) => Some(n as u64),
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                // tmpfs, for one. Asking again would cost a system call for every request.
                self.can_nowait.store(false, SeqCst);
                None
            }
            // Not cached; or a real error, which the submitted request will meet again.
            Err(_) => None,
        }
    }

    /// The outcome of a sync, with the memory of earlier ones.
    pub fn synced(&self, outcome: Result<()>) -> Result<()> {
        if outcome.is_err() {
            self.sync_failed.store(true, SeqCst);
        }
        if self.sync_failed.load(SeqCst) { Err(Error::Media) } else { outcome }
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // Closing would do, but a request that has just ended may keep the file open for a moment
        // longer.
        file_locks::unlock(self.fd.as_fd());
    }
}

/// Counts writes, so that an inline read can tell whether one ran beside it (a sequence lock whose
/// readers never wait).
#[derive(Debug, Default)]
pub(super) struct Writes {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// No write was running at some moment, and this many had begun by then.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quiet(u64);

impl Writes {
    /// Before the first system call that changes content.
    pub fn begin(&self) {
        self.begun.fetch_add(1, SeqCst);
    }

    /// After the last, before the answer.
    pub fn end(&self) {
        self.ended.fetch_add(1, SeqCst);
    }

    /// Some if no write is running.
    pub fn quiet(&self) -> Option<Quiet> {
        // `ended` first: both only rise and `ended` never passes `begun`, so equal values mean that
        // nothing ran in between.
        let ended = self.ended.load(SeqCst);
        (self.begun.load(SeqCst) == ended).then_some(Quiet(ended))
    }

    /// Whether no write has begun since.
    pub fn is_still(&self, quiet: Quiet) -> bool {
        self.begun.load(SeqCst) == quiet.0
    }
}

/// A device error for what a system call answered.
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
    /// A backing of a file in memory.
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
