//! A raw image or a block device as a device.
//!
//! Requests go through an `io_uring`: the thread that submits starts them, one thread per device
//! reaps ([`Engine::IoUring`]); where the kernel forbids `io_uring`, a few threads with plain
//! system calls do the same work ([`Engine::Threads`]). Inline there is only one thing: a buffered
//! read of what is in the page cache.
//!
//! **Sizes.** The device is as large as the file was when it was opened. It grows with the file:
//! [`File::refresh`] looks, and so does a request or extent query that reaches behind the known
//! end, and the start of every write and flush. (The NBD server refuses what lies behind the known
//! end before it asks: there a write, a flush or [`File::refresh`] shows the growth, and clients
//! learn of it when they connect.) It never shrinks. If the file is truncated underneath, reads
//! behind its real end answer [`Error::Media`], and so do writes, discards and zeroing that reach
//! behind it: they would re-extend the file behind its owner's back. A truncation between the
//! submission of a write and its answer can still be undone by that write. What remains of the file
//! stays usable. The file is never mapped, so there is no `SIGBUS`.
//!
//! **Overlap.** The kernel lets a read see half of a write that runs at the same time; this device
//! does not. Overlapping requests run one after the other in the order of their submission, all
//! others side by side.
//!
//! **Durability.** A flush is `fdatasync`, FUA is `RWF_DSYNC`. The kernel reports a failed
//! write-back once and then forgets the data; so after the first failure every later flush and FUA
//! write answers [`Error::Media`], until the file is opened anew.
//!
//! **Locks.** A writable device holds an exclusive `flock`, a read-only one a shared one, and both
//! hold the locks by which qemu tells who reads and who writes: what is written here qemu opens at
//! most with `--force-share`, what is read here it may read but not write, and what it has open is
//! refused here by the same rule. A writable block device is opened with `O_EXCL`, so that a
//! mounted one is refused.
//!
//! **Files that change.** A file that is only read is taken for unchanging. Others may pay no heed
//! to locks, so its size, time of modification and path are looked at now and then:
//! [`File::changed`].

mod backing;
mod engine;
mod extents;
mod job;
mod notes;
mod open;
mod ring;
mod schedule;
mod threads;
mod watch;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, Geometry, IoBuf, Op, Request, Result, Tried,
};

use backing::Backing;
use job::Job;
pub use open::SetupError;
use open::Tail;
pub use watch::{Changed, look_now, look_soon};

/// Most bytes that one try copies from the page cache.
const INLINE_MAX_BYTES: u64 = 256 << 10;

/// Whether the page cache is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Direct {
    /// Block devices are opened with `O_DIRECT`, files through the page cache.
    #[default]
    Auto,
    /// `O_DIRECT`; an error where the file system has none. The logical block is what the file
    /// system or disk asks for.
    On,
    /// Through the page cache. The logical block of a file is 512 bytes, that of a block device the
    /// disk's.
    Off,
}

/// What carries out the system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Engine {
    /// `io_uring` where the kernel allows it, else threads.
    #[default]
    Auto,
    /// `io_uring`, or a setup error.
    IoUring,
    /// A fixed number of threads.
    Threads,
}

/// What to open, and how.
#[derive(Debug, Clone)]
pub struct Config {
    /// A regular file or a block device.
    pub path: PathBuf,
    /// Serve reads only; the file is opened for reading only.
    pub read_only: bool,
    /// Page cache or not.
    pub direct: Direct,
    /// Bytes. Where no file is there, a sparse one of this size is made (mode 0600). A file that is
    /// there must have this size.
    pub size: Option<u64>,
    /// A file that is made has no name, and goes when the device does, also after a crash.
    pub nameless: bool,
    /// What carries out the system calls.
    pub engine: Engine,
    /// A file through the page cache may have any length, also none: its last block is
    /// [padded](Geometry::padding). Else it must be whole blocks, as for whoever stores things in
    /// it.
    pub padded: bool,
}

impl Config {
    /// A writable file that exists, everything else by default.
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

/// A raw image or a block device.
#[derive(Debug)]
pub struct File {
    /// Before `backing`: its threads end first.
    engine: engine::Running,
    backing: Arc<Backing>,
}

impl File {
    /// Opens a file or block device. One that is in use is tried for a second: the kernel may be
    /// about to end what a closed or killed user had asked for.
    ///
    /// # Errors
    /// Each [`SetupError`] names the path and what to do.
    pub fn open(config: &Config) -> std::result::Result<Self, SetupError> {
        let tail = if config.padded { Tail::Padded } else { Tail::Refused };
        Self::start(config, open::open(config, tail)?)
    }

    /// Opens a file or block device to which a RAM disk's pages are spilled, past the page cache
    /// where its file system can do that: there they would be in memory still. With a size, where
    /// no file is there, one of that size is made beside `path`; it never gets a name, so it is
    /// gone when the device is, however that ends.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_for_spilling(
        path: impl Into<PathBuf>,
        size: Option<u64>,
    ) -> std::result::Result<Self, SetupError> {
        let mut config = Config::new(path);
        (config.size, config.nameless, config.direct) = (size, true, Direct::On);
        match Self::open(&config) {
            Err(SetupError::Direct { .. }) => {
                let path = config.path.display();
                tracing::warn!("{path}: no O_DIRECT there; spilled pages go through the page cache");
                config.direct = Direct::Off;
                Self::open(&config)
            }
            opened => opened,
        }
    }

    /// As [`open`](Self::open), for a reader of a file that may end within a block: the device ends
    /// with the last whole one, and what follows it is given apart.
    pub(crate) fn open_with_tail(config: &Config) -> std::result::Result<(Self, Vec<u8>), SetupError> {
        let file = Self::start(config, open::open(config, Tail::Apart)?)?;
        let tail = file.backing.tail().map_err(|source| SetupError::Call {
            path: config.path.clone(),
            what: "read the end of",
            source,
        })?;
        Ok((file, tail))
    }

    fn start(config: &Config, backing: Backing) -> std::result::Result<Self, SetupError> {
        let backing = Arc::new(backing);
        let engine = engine::Running::start(config.engine, &backing)
            .map_err(|source| SetupError::Engine { path: config.path.clone(), source })?;
        Ok(Self { engine, backing })
    }

    /// Looks whether the file grew, and returns the device's size in bytes.
    ///
    /// # Errors
    /// [`Error::Media`] where the file cannot be asked.
    pub fn refresh(&self) -> Result<u64> {
        self.backing.refresh()?;
        Ok(self.backing.geometry().size)
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.backing.path
    }

    /// What became of the file, where it is only read, as of the last look ([`look_now`]).
    pub fn changed(&self) -> Option<Changed> {
        self.backing.watched.as_ref()?.changed()
    }

    /// Returns size, time of modification and inode of a file that is only read, as text: another
    /// text means that the file may have changed since. `None` of a disk, and of a file that is
    /// written.
    pub fn identity(&self) -> Option<String> {
        self.backing.watched.as_ref()?.identity()
    }

    /// Whether the page cache is passed by.
    pub fn is_direct(&self) -> bool {
        self.backing.direct
    }

    /// What carries out the system calls: never [`Engine::Auto`].
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

    /// Reads what the page cache has.
    fn read_cached(&self, request: &Request, out: &mut [u8]) -> Tried {
        let backing = &self.backing;
        let Some(quiet) = backing.writes.quiet() else { return Tried::WouldBlock };
        let want = request.len.min(INLINE_MAX_BYTES) as usize;
        let Some(found) = out.get_mut(..want).and_then(|out| backing.read_nowait(request.offset, out)) else {
            return Tried::WouldBlock;
        };
        let block = u64::from(backing.geometry().logical_block);
        let whole = found / block * block;
        // With a write begun meanwhile a block may be half old, half new: what was read is not
        // used.
        if whole == 0 || !backing.writes.is_still(quiet) {
            Tried::WouldBlock
        } else if whole == request.len {
            Tried::Done
        } else {
            Tried::Partly(whole)
        }
    }
}

impl Device for File {
    fn geometry(&self) -> Geometry {
        self.backing.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        self.check(request)?;
        Ok(match buffer {
            Buffer::Read(out) => self.read_cached(request, out),
            _ => Tried::WouldBlock,
        })
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        if let Err(error) = self.check(&request) {
            return done.complete(Err(error), buffer);
        }
        // The kernel will be given this memory: a caller's mistake must not reach beyond it.
        if matches!(request.op, Op::Read | Op::Write) && buffer.len() as u64 != request.len {
            return done.complete(Err(Error::Misaligned), buffer);
        }
        self.engine.submit(Job::new(request, buffer, done));
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.backing.extents(offset, len, row)
    }
}
