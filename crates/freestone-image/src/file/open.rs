//! Opening of a file or block device: checks, locks, and the geometry that the file system or disk
//! reports.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{
    AtFlags, FallocateFlags, FileType, Mode, OFlags, SeekFrom, Stat, StatxFlags, Timespec, Timestamps,
    UTIME_OMIT,
};
use rustix::io::Errno;
use thiserror::Error;

use freestone_core::device::{Geometry, IO_ALIGN_BYTES, IoBuf};
use freestone_core::file_locks::{self, Access, FileRegistration};
use freestone_core::file_size_limit::WriteErrorText;
use freestone_core::replace::{NEW_PREFIX, ReplaceTarget, TemporaryFile};
use freestone_core::sync::thread;

use super::backing::Backing;
use super::watch::FileWatch;
use super::{Config, Direct};

/// Smallest logical block size in bytes, used if nothing requires a larger one.
const MIN_BLOCK_BYTES: u32 = 512;
/// Largest logical block size that [`Geometry`] allows, in bytes.
const MAX_BLOCK_BYTES: u32 = 4096;
/// Largest preferred block size that is accepted from a file system, in bytes.
const MAX_PREFERRED_BYTES: u32 = 1 << 20;
/// Maximum number of attempts to open a file that is in use: one second in total.
const IN_USE_TRIES: u32 = 100;
/// As [`IN_USE_TRIES`], for a file that nobody but a killed process can use: ten seconds.
const ENDING_TRIES: u32 = 1000;
const IN_USE_PAUSE: Duration = Duration::from_millis(10);
/// Preferred request size (`io_opt`) in bytes, above which streaming is not faster.
const STREAM_BYTES: u32 = 1 << 20;

/// Errors from opening a file or block device.
#[derive(Debug, Error)]
pub enum SetupError {
    /// A system call failed, for example because the file is missing or access is denied.
    #[error("{}: cannot {what}: {}", path.display(), WriteErrorText(source))]
    Call {
        /// Path of the file.
        path: PathBuf,
        /// Action that failed, for example "open".
        what: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// The path is a directory, pipe, socket or character device.
    #[error("{}: is {kind}; a regular file or a block device is needed", path.display())]
    Kind {
        /// Path of the file.
        path: PathBuf,
        /// Type of the file, for example "a directory".
        kind: &'static str,
    },
    /// The file is empty, so the device would have no size.
    #[error("{}: is empty; truncate it to the size that the device should have", path.display())]
    Empty {
        /// Path of the file.
        path: PathBuf,
    },
    /// The length of the file is not a multiple of the block size.
    #[error(
        "{}: is {size} bytes long, which is not a multiple of its {block}-byte blocks; truncate it to {} bytes",
        path.display(), size.next_multiple_of(u64::from(*block))
    )]
    Size {
        /// Path of the file.
        path: PathBuf,
        /// Length of the file in bytes.
        size: u64,
        /// Required logical block size in bytes.
        block: u32,
    },
    /// The requested size is not possible for a file.
    #[error("{}: size is {size}; it must be from 512 to {} bytes", path.display(), i64::MAX)]
    InvalidSize {
        /// Path of the file.
        path: PathBuf,
        /// Requested size of the file in bytes.
        size: u64,
    },
    /// The existing file does not have the requested size.
    #[error("{}: is {found} bytes long and size is {asked}; leave size out to take the file as it is", path.display())]
    SizeMismatch {
        /// Path of the file.
        path: PathBuf,
        /// Length of the file in bytes.
        found: u64,
        /// Requested size of the file in bytes.
        asked: u64,
    },
    /// Another process, or another device of this process, has the file open.
    #[error("{}: is in use by another device or process", path.display())]
    InUse {
        /// Path of the file.
        path: PathBuf,
    },
    /// `O_DIRECT` was requested but is not possible.
    #[error("{}: cannot be opened with direct=on: {reason}", path.display())]
    Direct {
        /// Path of the file.
        path: PathBuf,
        /// Reason, for example that the file system does not support `O_DIRECT`.
        reason: String,
    },
    /// The block device has a logical block size that is not supported.
    #[error("{}: has blocks of {block} bytes; 512 to 4096 are supported", path.display())]
    Block {
        /// Path of the block device.
        path: PathBuf,
        /// Logical block size of the block device in bytes.
        block: u32,
    },
    /// The I/O engine (`io_uring` or threads) could not be started.
    #[error("{}: cannot start its I/O engine: {source}", path.display())]
    Engine {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
}

type Setup<T> = Result<T, SetupError>;

/// Handling of a file whose last block is partial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tail {
    /// Opening the file fails.
    Refused,
    /// The device ends at the last whole block, and the bytes after it are not part of the device.
    Separate,
    /// The last block is padded, which requires the page cache: only the page cache can write part
    /// of a block.
    Padded,
}

/// Opens and locks the file and determines its geometry. Retries for a second if the file is in
/// use. The previous user may be closed or killed while the kernel still finishes requests, which
/// keep the file open.
pub(super) fn open(config: &Config, tail: Tail) -> Setup<Backing> {
    if let Some(size) = config.size
        && !(u64::from(MIN_BLOCK_BYTES)..=i64::MAX as u64).contains(&size)
    {
        return Err(SetupError::InvalidSize { path: config.path.clone(), size });
    }
    open_when_free(config, &config.path, tail, IN_USE_TRIES)
}

/// Opens a file again that a killed process had open at `config.path`. Waits until the kernel has ended the
/// requests of that process: until then they keep its lock.
pub(super) fn open_again(config: &Config, file: BorrowedFd<'_>) -> Setup<Backing> {
    open_when_free(config, &descriptor_path(file), Tail::Refused, ENDING_TRIES)
}

/// Returns a path at which the file of a descriptor can be opened again, even if it has no name.
pub(super) fn descriptor_path(file: BorrowedFd<'_>) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn open_when_free(config: &Config, at: &Path, tail: Tail, tries: u32) -> Setup<Backing> {
    for _ in 1..tries {
        match open_once(config, at, tail) {
            Err(SetupError::InUse { .. }) => thread::sleep(IN_USE_PAUSE),
            opened => return opened,
        }
    }
    open_once(config, at, tail)
}

fn open_once(config: &Config, at: &Path, tail: Tail) -> Setup<Backing> {
    let mut unnamed = None;
    let backing = OpenAttempt::new(config, at, &mut unnamed)?.finish(tail)?;
    // Name the new file last, so that a failed or interrupted open leaves no file behind.
    if let Some(NewFile { place, file }) = unnamed {
        place.put_new(file).map_err(|source| match source.kind() {
            // Another process has created the file meanwhile.
            io::ErrorKind::AlreadyExists => SetupError::InUse { path: config.path.clone() },
            _ => SetupError::Call { path: config.path.clone(), what: "create", source },
        })?;
    }
    Ok(backing)
}

struct NewFile {
    place: ReplaceTarget,
    file: TemporaryFile,
}

impl NewFile {
    fn begin(path: &Path) -> io::Result<Self> {
        let place = ReplaceTarget::new(path)?;
        let file = place.begin(NEW_PREFIX)?;
        Ok(Self { place, file })
    }
}

struct OpenAttempt<'a> {
    config: &'a Config,
    fd: OwnedFd,
    held: FileRegistration,
    stat: Stat,
    is_block_device: bool,
    direct: bool,
}

impl<'a> OpenAttempt<'a> {
    fn new(config: &'a Config, at: &Path, unnamed: &mut Option<NewFile>) -> Setup<Self> {
        let path = &config.path;
        let call = |what| move |errno: Errno| failed(path, what, errno);
        // Check the type before opening, as opening a pipe blocks, and opening a tape device
        // rewinds it.
        let found = match rustix::fs::stat(at) {
            Ok(stat) => Some(kind(path, &stat)?),
            Err(Errno::NOENT) if config.size.is_some() && !config.read_only => None,
            Err(errno) => return Err(failed(path, "open", errno)),
        };
        let is_block_device = found == Some(FileType::BlockDevice);
        let direct = match config.direct {
            Direct::Auto => is_block_device,
            Direct::On => true,
            Direct::Off => false,
        };
        let mut flags = OFlags::CLOEXEC | OFlags::NONBLOCK;
        flags |= if config.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        if is_block_device && !config.read_only {
            // `O_EXCL` without `O_CREAT` fails if the block device is mounted or otherwise claimed.
            flags |= OFlags::EXCL;
        }
        let opened = if found.is_some() {
            rustix::fs::open(at, flags, Mode::empty())
        } else {
            let made = NewFile::begin(path).and_then(|new| {
                let fd = new.file.as_file().try_clone()?;
                // Dropping `new` removes the temporary name, if the file system required one.
                *unnamed = (!config.nameless).then_some(new);
                Ok(fd.into())
            });
            let failed = |source| SetupError::Call { path: path.clone(), what: "create", source };
            Ok(made.map_err(failed)?)
        };
        let fd = match opened {
            Ok(fd) => fd,
            Err(Errno::BUSY) => return Err(SetupError::InUse { path: path.clone() }),
            Err(errno) => return Err(failed(path, "open", errno)),
        };
        let access = if config.read_only { Access::Read } else { Access::Write };
        file_locks::lock(fd.as_fd(), access).map_err(|errno| match errno {
            Errno::WOULDBLOCK => SetupError::InUse { path: path.clone() },
            errno => failed(path, "lock", errno),
        })?;
        if let Some(size) = config.size
            && found.is_none()
        {
            rustix::fs::ftruncate(&fd, size).map_err(call("set the size"))?;
        }
        // The path may have been replaced by another file between `stat` and `open`.
        let stat = rustix::fs::fstat(&fd).map_err(call("examine"))?;
        let opened = kind(path, &stat)?;
        if found.is_some_and(|found| found != opened) {
            return Err(SetupError::InUse { path: path.clone() });
        }
        let held = FileRegistration::new(&stat);
        // Another process may have replaced the file before the lock was taken.
        if found.is_some() {
            match rustix::fs::stat(at) {
                Ok(present) if is_same(&present, &stat) => {}
                Ok(_) | Err(Errno::NOENT) => return Err(SetupError::InUse { path: path.clone() }),
                Err(errno) => return Err(failed(path, "examine", errno)),
            }
        }
        // Clear `O_NONBLOCK`, which was needed only for opening: io_uring would return EAGAIN.
        // `O_DIRECT` is set last, so that its EINVAL cannot be confused with another error.
        let keep = if direct { OFlags::DIRECT } else { OFlags::empty() };
        rustix::fs::fcntl_setfl(&fd, keep).map_err(|errno| match errno {
            Errno::INVAL if direct => {
                let reason = "its file system has no O_DIRECT".to_owned();
                SetupError::Direct { path: path.clone(), reason }
            }
            errno => failed(path, "set the flags of", errno),
        })?;
        Ok(Self { config, fd, held, stat, is_block_device, direct })
    }

    fn finish(self, tail: Tail) -> Setup<Backing> {
        let path = &self.config.path;
        let call = |what| move |errno: Errno| failed(path, what, errno);
        let size = if self.is_block_device {
            rustix::fs::seek(&self.fd, SeekFrom::End(0)).map_err(call("measure"))?
        } else {
            u64::try_from(self.stat.st_size).unwrap_or(0)
        };
        let padded = tail == Tail::Padded && !self.direct && !self.is_block_device;
        if size == 0 && !padded {
            return Err(SetupError::Empty { path: path.clone() });
        }
        if let Some(asked) = self.config.size
            && asked != size
        {
            return Err(SetupError::SizeMismatch { path: path.clone(), found: size, asked });
        }
        let logical = self.logical_block()?;
        let block = u64::from(logical);
        if !padded && !size.is_multiple_of(block) && (tail != Tail::Separate || size < block) {
            return Err(SetupError::Size { path: path.clone(), size, block: logical });
        }
        let size = if padded { size } else { size - size % block };
        let physical = if self.is_block_device {
            rustix::fs::ioctl_blkpbszget(&self.fd).unwrap_or(logical)
        } else {
            u32::try_from(self.stat.st_blksize).unwrap_or(logical)
        };
        let usable = physical.is_power_of_two() && (logical..=MAX_PREFERRED_BYTES).contains(&physical);
        let physical = if usable { physical } else { logical };
        let granularity = if self.config.read_only { 0 } else { self.discard_granularity(size, physical) };
        let geometry = Geometry {
            size,
            logical_block: logical,
            physical_block: physical,
            io_min: physical,
            io_opt: STREAM_BYTES,
            discard_granularity: granularity,
            fast_zeroes: granularity > 0,
            volatile_cache: true,
            padding: 0,
            volatile_media: false,
            rotational: false,
            max_request: 0,
            read_only: self.config.read_only,
            ignores_data: false,
            zones: None,
        };
        let (bytes, size) = (geometry.size, geometry.size.next_multiple_of(block));
        let geometry = Geometry { size, padding: (size - bytes) as u32, ..geometry };
        let watched = self.config.read_only.then(|| FileWatch::new(path, self.fd.as_fd(), &self.stat));
        let watched = watched.transpose().map_err(call("examine"))?;
        let mut backing = Backing::new(self.fd, path.clone(), self.is_block_device, self.direct, geometry);
        backing.lock_entry = Some(self.held);
        backing.padded = padded;
        backing.modified_at_open = modified(&self.stat);
        backing.watched = watched;
        Ok(backing)
    }

    /// Returns the logical block size in bytes: the required alignment of requests.
    fn logical_block(&self) -> Setup<u32> {
        let path = &self.config.path;
        if self.is_block_device {
            let block = rustix::fs::ioctl_blksszget(&self.fd)
                .map_err(|errno| failed(path, "ask for the block of", errno))?;
            return if block.is_power_of_two() && (MIN_BLOCK_BYTES..=MAX_BLOCK_BYTES).contains(&block) {
                Ok(block)
            } else {
                Err(SetupError::Block { path: path.clone(), block })
            };
        }
        if !self.direct {
            return Ok(MIN_BLOCK_BYTES);
        }
        let refuse = |reason: String| SetupError::Direct { path: path.clone(), reason };
        let align = rustix::fs::statx(&self.fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
            .ok()
            .filter(|found| found.stx_mask & StatxFlags::DIOALIGN.bits() != 0)
            .map(|found| (found.stx_dio_offset_align, found.stx_dio_mem_align));
        let block = match align {
            Some((0, _)) => return Err(refuse("its file system has no O_DIRECT for this file".into())),
            // After a short transfer, the memory address advances with the file offset. Therefore a
            // single alignment must satisfy both requirements.
            Some((offset, memory)) => offset.max(memory).max(MIN_BLOCK_BYTES),
            None => self.probe().ok_or_else(|| refuse("no read of up to 4096 bytes succeeds".into()))?,
        };
        if block.is_power_of_two() && block <= MAX_BLOCK_BYTES {
            Ok(block)
        } else {
            Err(refuse(format!("it needs requests aligned to {block} bytes; up to 4096 are supported")))
        }
    }

    /// Returns the size of the smallest aligned read that succeeds with `O_DIRECT`; `None` if none
    /// does. Used on kernels before 6.1 and on file systems that do not report their alignment.
    fn probe(&self) -> Option<u32> {
        let mut memory = IoBuf::zeroed(IO_ALIGN_BYTES).ok()?;
        let mut block = MIN_BLOCK_BYTES;
        while block <= MAX_BLOCK_BYTES {
            if rustix::io::pread(&self.fd, &mut memory[..block as usize], 0).is_ok() {
                return Some(block);
            }
            block *= 2;
        }
        None
    }

    /// Restores the modification time, which the test punch in `discard_granularity` may have
    /// changed. Only the owner of the file may set it, so failures are ignored.
    fn restore_modified_time(&self) {
        let at = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
        let times = Timestamps {
            last_access: at(0, UTIME_OMIT),
            last_modification: at(self.stat.st_mtime, self.stat.st_mtime_nsec as _),
        };
        let _ = rustix::fs::futimens(&self.fd, &times);
    }

    /// Returns the smallest range that a discard frees, in bytes; 0 if discards are not supported.
    fn discard_granularity(&self, size: u64, block: u32) -> u32 {
        if !self.is_block_device {
            // Test the support by punching a range beyond the end of the file, where no data is.
            let beyond_end = size.next_multiple_of(u64::from(MAX_PREFERRED_BYTES));
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let punched = rustix::fs::fallocate(&self.fd, mode, beyond_end, u64::from(block));
            self.restore_modified_time();
            return if punched.is_ok() { block } else { 0 };
        }
        // `fallocate` on a block device is "write zeroes with unmap". The queue limits in sysfs
        // show if the disk supports that.
        let (major, minor) = (rustix::fs::major(self.stat.st_rdev), rustix::fs::minor(self.stat.st_rdev));
        let queue = |name: &str| {
            let device = format!("/sys/dev/block/{major}:{minor}");
            let of = |dir: &str| fs::read_to_string(format!("{device}/{dir}/{name}"));
            // A partition does not have a queue directory; it uses the queue of its disk.
            let text = of("queue").or_else(|_| of("../queue")).unwrap_or_default();
            text.trim().parse::<u64>().unwrap_or(0)
        };
        if queue("write_zeroes_max_bytes") == 0 {
            return 0;
        }
        let granularity = u32::try_from(queue("discard_granularity")).unwrap_or(0);
        if granularity >= block && granularity.is_multiple_of(block) { granularity } else { block }
    }
}

fn is_same(a: &Stat, b: &Stat) -> bool {
    (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
}

/// Returns the modification time in nanoseconds since 1970 and the size in bytes; `None` if the
/// size is negative.
pub(super) fn modified(stat: &Stat) -> Option<(i128, u64)> {
    let time = i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec);
    Some((time, u64::try_from(stat.st_size).ok()?))
}

/// Returns the type of a regular file or block device; fails for any other type.
fn kind(path: &Path, stat: &Stat) -> Setup<FileType> {
    let refuse = |kind| Err(SetupError::Kind { path: path.to_owned(), kind });
    match FileType::from_raw_mode(stat.st_mode) {
        kind @ (FileType::RegularFile | FileType::BlockDevice) => Ok(kind),
        FileType::Directory => refuse("a directory"),
        FileType::CharacterDevice => refuse("a character device"),
        FileType::Fifo => refuse("a pipe"),
        FileType::Socket => refuse("a socket"),
        _ => refuse("not a regular file"),
    }
}

fn failed(path: &Path, what: &'static str, errno: Errno) -> SetupError {
    SetupError::Call { path: path.to_owned(), what, source: errno.into() }
}
