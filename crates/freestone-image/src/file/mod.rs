//! A raw image file or a block device as a [`Device`].
//!
//! [`Engine::IoUring`] submits each request on the caller's thread; one thread per device reaps
//! completions. If the kernel forbids `io_uring`, [`Engine::Threads`] makes the same system calls
//! on a fixed number of threads. Only buffered reads of cached pages complete inline.
//!
//! **Size.** The device has the size of the file at opening, and grows with the file.
//! [`File::refresh`], each write and flush, and each request or extent query beyond the known end
//! pick up growth. (The NBD server itself rejects requests beyond the known end. Exported files
//! therefore grow only by a write, a flush or [`File::refresh`], and clients see the new size when
//! they connect.) The device never shrinks. If the file is truncated, requests beyond its real end
//! fail with [`Error::Media`]. Otherwise writes, discards and write zeroes would extend the file
//! again, against the intention of its owner. A truncation between the submission and the
//! completion of a write can still be undone by that write. The rest of the file stays usable. The
//! file is never mapped, so a truncation cannot raise `SIGBUS`.
//!
//! **Ordering.** The kernel may return half of a concurrent write to a read; this device does not.
//! Overlapping requests run in submission order, all others concurrently.
//!
//! **Durability.** A flush is `fdatasync`, FUA is `RWF_DSYNC`. The kernel reports a failed
//! writeback once and then drops the data. After the first failure, every later flush and FUA write
//! therefore fails with [`Error::Media`] until the file is opened again.
//!
//! **Locks.** A writable device holds an exclusive `flock`, a read-only device a shared one. Both
//! also hold qemu's byte-range locks. If this process has a file open for writing, qemu can open
//! the file only with `--force-share`. If this process has a file open read-only, qemu can read but
//! not write the file. By the same rules, this process refuses files that qemu has open. A writable
//! block device is opened with `O_EXCL`, which refuses mounted ones.
//!
//! **Changed files.** A read-only file is assumed to be immutable. Programs that ignore locks may
//! still change the file, so a thread checks size, modification time and path periodically:
//! [`File::change`].

mod backing;
mod engine;
mod extents;
mod job;
mod open;
mod ring;
mod schedule;
mod threads;
mod watch;
mod xattrs;

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};

use freestone_core::device::{
    Buffer, Completion, Device, DropObserver, DropSignal, Error, Extent, Geometry, IoBuf, Op, Request,
    Result, TryResult,
};

use backing::Backing;
use job::Job;
pub use open::SetupError;
use open::Tail;
pub use watch::{FileChange, check_now, request_check};

/// Maximum number of bytes that one inline read copies from the page cache.
const INLINE_MAX_BYTES: u64 = 256 << 10;

/// Use of the page cache for a file or block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Direct {
    /// `O_DIRECT` for block devices, the page cache for files.
    #[default]
    Auto,
    /// `O_DIRECT`; opening fails if the file system does not support it. The file system or disk
    /// determines the logical block size.
    On,
    /// Page cache. The logical block size is 512 bytes for a file, and that of the disk for a block
    /// device.
    Off,
}

/// Mechanism that makes the system calls for requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Engine {
    /// `io_uring` if the kernel allows it, otherwise threads.
    #[default]
    Auto,
    /// `io_uring`; opening fails if it is not available.
    IoUring,
    /// A fixed number of threads with blocking system calls.
    Threads,
}

/// Options for opening a [`File`].
#[derive(Debug, Clone)]
pub struct Config {
    /// Path of a regular file or a block device.
    pub path: PathBuf,
    /// Opens the file read-only and serves only reads.
    pub read_only: bool,
    /// Whether to use the page cache.
    pub direct: Direct,
    /// Size in bytes. A missing file is created as a sparse file of this size (mode 0600). An
    /// existing file must have this size.
    pub size: Option<u64>,
    /// Gives a newly created file no name, so that the file disappears with the device, even after
    /// a crash.
    pub nameless: bool,
    /// Mechanism that makes the system calls for requests.
    pub engine: Engine,
    /// With the page cache, accepts a file of any length, including 0, and
    /// [pads](Geometry::padding) the last block. Otherwise the length must be a multiple of the
    /// block size.
    pub padded: bool,
}

impl Config {
    /// Returns options for an existing writable file, with all other options at their defaults.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            read_only: false,
            direct: Direct::default(),
            size: None,
            nameless: false,
            engine: Engine::default(),
            padded: false,
        }
    }
}

/// An open raw image file or block device.
#[derive(Debug)]
pub struct File {
    /// Declared before `backing`, so that the engine's threads end before the file is closed.
    engine: engine::ActiveEngine,
    backing: Arc<Backing>,
    /// The last field, so that the file is closed before.
    drop_signal: DropSignal,
}

impl File {
    /// Opens a file or block device. Retries for a second if the file is in use: the kernel may
    /// still be finishing requests of a closed or killed user.
    ///
    /// # Errors
    /// Fails with a [`SetupError`], whose message contains the path and the remedy.
    pub fn open(config: &Config) -> std::result::Result<Self, SetupError> {
        let tail = if config.padded { Tail::Padded } else { Tail::Refused };
        Self::start(config, open::open(config, tail)?)
    }

    /// Opens a file or block device as a backing device for the writeback of a RAM disk. Uses
    /// `O_DIRECT` if the file system supports it, since pages in the page cache would still occupy
    /// memory. If `size` is given and the file does not exist, creates a file of that size in the
    /// directory of `path`. The new file never has a name, so it disappears with the device, even
    /// after a crash.
    pub fn open_for_writeback(
        path: impl Into<PathBuf>,
        size: Option<u64>,
    ) -> std::result::Result<Self, SetupError> {
        let config = Config { size, nameless: true, ..Config::new(path) };
        Self::open_direct_if_possible(config, &|config| Self::open(config))
    }

    /// Opens a file of [`second_descriptor`](Self::second_descriptor) as a backing device again, after the
    /// process that had opened it as [`open_for_writeback`](Self::open_for_writeback) was killed. Waits up to
    /// ten seconds until the kernel has ended the requests of that process, so none of its writes can follow.
    /// `path` is for messages.
    pub fn open_again_for_writeback(
        file: BorrowedFd<'_>,
        path: impl Into<PathBuf>,
    ) -> std::result::Result<Self, SetupError> {
        Self::open_direct_if_possible(Config::new(path), &|config| {
            Self::start(config, open::open_again(config, file)?)
        })
    }

    fn open_direct_if_possible(
        mut config: Config,
        open: &dyn Fn(&Config) -> std::result::Result<Self, SetupError>,
    ) -> std::result::Result<Self, SetupError> {
        config.direct = Direct::On;
        match open(&config) {
            Err(SetupError::Direct { .. }) => {
                let path = config.path.display();
                tracing::warn!("{path}: no O_DIRECT support; written-back pages go through the page cache");
                config.direct = Direct::Off;
                open(&config)
            }
            opened => opened,
        }
    }

    /// Returns a descriptor with which another process can open the file again, even if it has no name. The
    /// descriptor has no lock, and no request uses it.
    ///
    /// # Errors
    /// Errors of `open(2)`. Needs `/proc`.
    pub fn second_descriptor(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let path = open::descriptor_path(self.backing.fd.as_fd());
        Ok(rustix::fs::open(path, flags, Mode::empty())?)
    }

    /// Opens a file like [`open`](Self::open), but accepts a file that ends within a block. The
    /// device ends at the last whole block; the bytes after that block are returned separately.
    pub(crate) fn open_with_tail(config: &Config) -> std::result::Result<(Self, Vec<u8>), SetupError> {
        let file = Self::start(config, open::open(config, Tail::Separate)?)?;
        let tail = file.backing.tail().map_err(|source| SetupError::Call {
            path: config.path.clone(),
            what: "read the end of",
            source,
        })?;
        Ok((file, tail))
    }

    fn start(config: &Config, backing: Backing) -> std::result::Result<Self, SetupError> {
        let backing = Arc::new(backing);
        let engine = engine::ActiveEngine::start(config.engine, &backing)
            .map_err(|source| SetupError::Engine { path: config.path.clone(), source })?;
        Ok(Self { engine, backing, drop_signal: DropSignal::default() })
    }

    /// Returns an observer of the end of this device, when the file is closed.
    pub fn drop_observer(&self) -> DropObserver {
        self.drop_signal.observer()
    }

    /// Picks up growth of the file, and returns the size of the device in bytes.
    pub fn refresh(&self) -> Result<u64> {
        self.backing.refresh()?;
        Ok(self.backing.geometry().size)
    }

    /// Returns the path at which the file was opened.
    pub fn path(&self) -> &Path {
        &self.backing.path
    }

    /// Returns the change that the last check ([`check_now`]) of a read-only file found; `None` if
    /// the file is unchanged, or writable.
    pub fn change(&self) -> Option<FileChange> {
        self.backing.watched.as_ref()?.change()
    }

    /// Returns size, modification time and inode of a read-only file at opening, as text. A
    /// different text at another opening means that the file may have changed. Returns `None` for a
    /// block device and for a writable file.
    pub fn identity(&self) -> Option<String> {
        self.backing.watched.as_ref()?.identity()
    }

    /// Returns true if the file is open with `O_DIRECT`.
    pub fn is_direct(&self) -> bool {
        self.backing.direct
    }

    /// Returns the engine in use, which is never [`Engine::Auto`].
    pub fn engine(&self) -> Engine {
        self.engine.kind()
    }

    fn check(&self, request: &Request) -> Result<()> {
        match request.check(&self.backing.geometry()) {
            Err(Error::OutOfRange) => {
                self.backing.refresh()?;
                request.check(&self.backing.geometry())
            }
            checked => checked,
        }
    }

    /// Reads as much of the request as is in the page cache, without blocking.
    fn read_cached(&self, request: &Request, out: &mut [u8]) -> TryResult {
        let backing = &self.backing;
        let Some(idle_mark) = backing.writes.idle_mark() else { return TryResult::WouldBlock };
        let want = request.len.min(INLINE_MAX_BYTES) as usize;
        let Some(found) = out.get_mut(..want).and_then(|out| backing.read_nowait(request.offset, out)) else {
            return TryResult::WouldBlock;
        };
        let block = u64::from(backing.geometry().logical_block);
        let whole = found / block * block;
        // A concurrent write may leave a block half old and half new, so the data is discarded if a
        // write has begun meanwhile.
        if whole == 0 || !backing.writes.is_unchanged_since(idle_mark) {
            TryResult::WouldBlock
        } else if whole == request.len {
            TryResult::Done
        } else {
            TryResult::Partly(whole)
        }
    }
}

impl Device for File {
    fn geometry(&self) -> Geometry {
        self.backing.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        self.check(request)?;
        Ok(match buffer {
            Buffer::Read(out) => self.read_cached(request, out),
            _ => TryResult::WouldBlock,
        })
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        if let Err(error) = self.check(&request) {
            return done.complete(Err(error), buffer);
        }
        // The kernel writes to or reads from the buffer, so a wrong length must not reach beyond
        // its end.
        if matches!(request.op, Op::Read | Op::Write) && buffer.len() as u64 != request.len {
            return done.complete(Err(Error::Misaligned), buffer);
        }
        self.engine.submit(Job::new(request, buffer, done));
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.backing.extents(offset, len, row)
    }
}
