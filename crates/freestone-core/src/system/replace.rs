//! Atomic replacement of files. A new file is written in the directory of its final path until it is complete
//! and durable, and is then moved to the path. At any moment, also after a crash, the path holds the old file
//! or the new one.
//!
//! A new file has no name (`O_TMPFILE`) until it is complete, so no file is left if the process dies.
//! Replacing an old file in one step needs a temporary name for a moment. On file systems without `O_TMPFILE`
//! the new file has a temporary name from the start. [`find_stale_files`] finds temporary names left by a
//! crash.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;
use tempfile::TempPath;

use crate::fail_points::{self, Call};
use crate::file_locks::{self, Access};
use crate::sync::{Instant, LazyLock, Mutex, thread};

/// Prefixes of all temporary names, by which [`find_stale_files`] recognises them.
const PREFIXES: [&str; 4] = [SAVE_PREFIX, DELTA_PREFIX, STATE_PREFIX, NEW_PREFIX];
/// Temporary name prefix of saved devices.
pub const SAVE_PREFIX: &str = ".freestone-save-";
/// Temporary name prefix of deltas.
pub const DELTA_PREFIX: &str = ".freestone-delta-";
/// Temporary name prefix of zone states.
pub const STATE_PREFIX: &str = ".freestone-zones-";
/// Temporary name prefix of new images and write logs.
pub const NEW_PREFIX: &str = ".freestone-new-";
const SUFFIX: &str = ".tmp";
/// Number of bytes read from the start of an existing file to identify its kind.
const HEAD_BYTES: u64 = 64;
/// Maximum number of attempts to place a file while other processes create or remove a file at the path.
const ATTEMPTS_MAX: u32 = 16;
/// Maximum time to wait for another process that is replacing the same file.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(1);
const LOCK_RETRY_PAUSE: Duration = Duration::from_millis(5);

/// Which existing file a new one may replace. A file in use by this process, another Freestone process or
/// qemu is never replaced, nor is anything but a regular file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReplacePolicy {
    /// Only a file of the same kind, or an empty file, may be replaced.
    #[default]
    SameKind,
    /// Any regular file that is not in use may be replaced.
    Any,
}

/// The check that an existing file must pass before [`ReplaceTarget::put`] replaces the file.
#[derive(Debug, Clone, Copy)]
pub enum ReplaceCheck {
    /// No file may exist.
    Nothing,
    /// Any file may be replaced.
    Any,
    /// An empty file, or a file of the right kind, may be replaced.
    Only {
        /// Returns true if the first bytes of a file identify a file of the right kind.
        are: fn(&[u8]) -> bool,
        /// Name of the kind, for error messages.
        kind: &'static str,
    },
}

impl ReplacePolicy {
    /// Returns the check for files of the kind named `kind`, whose first bytes satisfy `are`.
    pub fn check_for(self, kind: &'static str, are: fn(&[u8]) -> bool) -> ReplaceCheck {
        match self {
            Self::SameKind => ReplaceCheck::Only { are, kind },
            Self::Any => ReplaceCheck::Any,
        }
    }
}

/// Result of [`ReplaceTarget::put`]: whether a crash can bring back the old file.
#[derive(Debug)]
#[must_use]
pub enum Durability {
    /// The file and its name are durable.
    Durable,
    /// The new file is or may be at its path, and a crash can bring back the old state; contains the reason.
    /// A later successful fsync does not make the file durable; it must be written again.
    Unknown(io::Error),
}

impl Durability {
    /// Returns an error unless the file and its name are durable.
    ///
    /// # Errors
    /// The reason why the durability is unknown, with the same error kind.
    pub fn into_result(self) -> io::Result<()> {
        let Self::Unknown(error) = self else { return Ok(()) };
        let why = format!(
            "the new file may be in its place, and a crash may bring the old one back; write it again: {error}"
        );
        Err(io::Error::new(error.kind(), why))
    }
}

/// The path of a file to be created or replaced.
#[derive(Debug)]
pub struct ReplaceTarget {
    /// Absolute path of the file; not a symbolic link.
    pub path: PathBuf,
    /// Directory of the file.
    pub dir: PathBuf,
}

/// The old file at the path, locked so that no process uses it before it is replaced.
struct OldFile {
    locked: File,
}

impl Drop for OldFile {
    fn drop(&mut self) {
        file_locks::unlock(self.locked.as_fd());
    }
}

enum LookResult {
    Lockable(Option<OldFile>),
    /// The file is in use, or is being replaced.
    InUse,
}

impl ReplaceTarget {
    /// Resolves the path `to`, at which a regular file or nothing exists.
    pub fn new(to: &Path) -> io::Result<Self> {
        let path = match fs::metadata(to) {
            Ok(found) if found.is_file() => fs::canonicalize(to)?,
            Ok(_) => return Err(not_a_file_error()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                match fs::symlink_metadata(to) {
                    Ok(_) => return Err(io::Error::other("the path is a dangling symbolic link")),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
                let name = to.file_name().ok_or_else(|| io::Error::other("the path has no file name"))?;
                let dir = to.parent().filter(|dir| !dir.as_os_str().is_empty());
                fs::canonicalize(dir.unwrap_or(Path::new(".")))?.join(name)
            }
            Err(error) => return Err(error),
        };
        let dir = path.parent().map_or_else(|| PathBuf::from("/"), Path::to_owned);
        Ok(Self { path, dir })
    }

    /// Checks the existing file, so that an error of [`put`](Self::put) is found before the new file is
    /// written.
    pub fn check(&self, check: ReplaceCheck) -> io::Result<()> {
        self.lock_old(check).map(drop)
    }

    fn lock_old(&self, check: ReplaceCheck) -> io::Result<Option<OldFile>> {
        let until = Instant::now() + LOCK_WAIT_MAX;
        loop {
            match self.try_lock_old(check)? {
                LookResult::Lockable(old) => return Ok(old),
                LookResult::InUse if Instant::now() < until => thread::sleep(LOCK_RETRY_PAUSE),
                LookResult::InUse => {
                    let why = "the file is in use by another process";
                    return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
                }
            }
        }
    }

    fn try_lock_old(&self, check: ReplaceCheck) -> io::Result<LookResult> {
        // Nonblocking, because the path may be a pipe by now and opening a pipe could block.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let mut file = match File::options().read(true).custom_flags(flags).open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(LookResult::Lockable(None)),
            Err(error) => return Err(error),
        };
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(not_a_file_error());
        }
        if file_locks::is_registered(&stat) {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "the file is open in this server"));
        }
        match file_locks::lock(file.as_fd(), Access::Write) {
            // Some file systems have no locks. The file is then replaced without one.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(Errno::WOULDBLOCK) => return Ok(LookResult::InUse),
            Err(errno) => {
                let error = io::Error::from(errno);
                let why = format!("cannot lock the existing file: {error}");
                return Err(io::Error::new(error.kind(), why));
            }
        }
        let refuse = |why: String| Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        match check {
            ReplaceCheck::Any => {}
            ReplaceCheck::Nothing => return refuse("the file already exists".to_owned()),
            ReplaceCheck::Only { are, kind } => {
                let mut head = Vec::new();
                file.by_ref().take(HEAD_BYTES).read_to_end(&mut head)?;
                if !head.is_empty() && !are(&head) {
                    return refuse(format!("the file exists and is not a {kind}"));
                }
            }
        }
        Ok(LookResult::Lockable(Some(OldFile { locked: file })))
    }

    /// Creates a file with mode 0600, which is removed on drop. If the file needs a temporary name, the name
    /// begins with `prefix`.
    pub fn begin(&self, prefix: &'static str) -> io::Result<TemporaryFile> {
        // The directory is opened before the file is written, so that after the move only the fsync can fail.
        let dir = self.open_dir()?;
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let (file, name) = match rustix::fs::open(&self.dir, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) if can_be_named(&fd) => (File::from(fd), None),
            // O_TMPFILE is unsupported, or such files cannot be named later.
            Ok(_) | Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let mut options = File::options();
                options.read(true).write(true).create_new(true).mode(0o600);
                let (file, name) = TemporaryName::new(&self.dir, prefix, |path| options.open(path))?;
                (file, Some(name))
            }
            Err(errno) => return Err(errno.into()),
        };
        // The lock shows other processes that the file is in use.
        let _ = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
        Ok(TemporaryFile { file, name, prefix, dir })
    }

    /// Makes the file durable and moves it to the path, if `check` allows replacing the file at the path.
    ///
    /// # Errors
    /// The file at the path, if any, is unchanged.
    pub fn put(&self, temporary: TemporaryFile, check: ReplaceCheck) -> io::Result<Durability> {
        let TemporaryFile { file, mut name, prefix, dir } = temporary;
        fail_points::call(Call::SyncFile, || file.sync_all())?;
        for _ in 0..ATTEMPTS_MAX {
            let old = self.lock_old(check)?;
            let placed = match (name.take(), &old) {
                (Some(name), _) => name.rename(&self.path, old.is_some()),
                (None, Some(_)) => TemporaryName::new(&self.dir, prefix, |path| link(&file, path))?
                    .1
                    .rename(&self.path, true),
                (None, None) => {
                    fail_points::call(Call::Place, || link(&file, &self.path)).map_err(|error| (error, None))
                }
            };
            let Err((error, back)) = placed else { return Ok(finish(file, &dir)) };
            match self.holds(&file) {
                // The rename took effect although it returned an error.
                Ok(true) => return Ok(finish(file, &dir)),
                // Another process has created a file at the path meanwhile, which the next attempt checks.
                Ok(false) if error.kind() == io::ErrorKind::AlreadyExists => name = back,
                Ok(false) => return Err(error),
                Err(_) => return Ok(Durability::Unknown(error)),
            }
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, "other processes keep creating the file"))
    }

    /// Makes a complete file durable and gives it the path, at which no file may exist. The returned file is
    /// open and still locked. If the name cannot be made durable, it is removed.
    ///
    /// # Errors
    /// [`AlreadyExists`](io::ErrorKind::AlreadyExists) if the path exists; otherwise the error of the system.
    pub fn put_new(&self, temporary: TemporaryFile) -> io::Result<File> {
        let created = temporary.created_file(self)?;
        let TemporaryFile { file, name, dir, .. } = temporary;
        fail_points::call(Call::SyncFile, || file.sync_all())?;
        let placed = match name {
            None => fail_points::call(Call::Place, || link(&file, &self.path)),
            Some(name) => name.rename(&self.path, false).map_err(|(error, _)| error),
        };
        // A failed call may have taken effect, so the file is removed.
        placed.and_then(|()| sync_dir(&dir)).inspect_err(|_| created.remove())?;
        Ok(file)
    }

    /// Returns true if the path refers to `file`.
    fn holds(&self, file: &File) -> io::Result<bool> {
        let own = rustix::fs::fstat(file)?;
        match rustix::fs::lstat(&self.path) {
            Ok(found) => Ok(is_same(own, found)),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    fn open_dir(&self) -> io::Result<File> {
        fail_points::call(Call::OpenDir, || File::open(&self.dir))
    }

    /// Makes the name of the file durable by syncing its directory.
    pub fn sync_name(&self) -> io::Result<()> {
        sync_dir(&self.open_dir()?)
    }
}

/// Unlocks a file that was moved to its path, and syncs its directory.
fn finish(file: File, dir: &File) -> Durability {
    // Unlocked explicitly, because a child process being started keeps the file open until its exec.
    file_locks::unlock(file.as_fd());
    drop(file);
    match sync_dir(dir) {
        Ok(()) => Durability::Durable,
        Err(error) => Durability::Unknown(error),
    }
}

/// Makes the changes of names in a directory durable.
///
/// # Errors
/// The directory's latest changes may or may not survive a crash.
pub fn sync_dir(dir: &File) -> io::Result<()> {
    fail_points::call(Call::SyncDir, || dir.sync_all())
}

fn not_a_file_error() -> io::Error {
    io::Error::other("the path is not a regular file")
}

/// A new file that has not been moved to its path yet.
#[derive(Debug)]
pub struct TemporaryFile {
    file: File,
    name: Option<TemporaryName>,
    prefix: &'static str,
    dir: File,
}

impl TemporaryFile {
    /// Returns the open file, which has no name or a temporary name.
    pub const fn as_file(&self) -> &File {
        &self.file
    }

    /// Returns the path and inode by which the file can be removed after it was moved to `target`.
    pub fn created_file(&self, target: &ReplaceTarget) -> io::Result<CreatedFile> {
        let stat = rustix::fs::fstat(&self.file)?;
        Ok(CreatedFile { path: target.path.clone(), inode: (stat.st_dev, stat.st_ino) })
    }
}

/// A file that this process created at a path, to be removed if a later step fails.
#[derive(Debug, Clone)]
pub struct CreatedFile {
    path: PathBuf,
    inode: (u64, u64),
}

impl CreatedFile {
    /// Removes the file, unless the path holds another file.
    pub fn remove(&self) {
        let removed = match rustix::fs::lstat(&self.path) {
            Ok(stat) if (stat.st_dev, stat.st_ino) == self.inode => fs::remove_file(&self.path),
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        };
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove an unused new file");
        }
    }
}

/// Returns the path in `/proc` by which a file without a name can be linked.
fn descriptor_path(file: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn can_be_named(file: &(impl AsRawFd + AsFd)) -> bool {
    // Linking a file without a name needs `/proc`; other ways need a privilege.
    rustix::fs::fstat(file)
        .is_ok_and(|a| rustix::fs::stat(descriptor_path(file)).is_ok_and(|b| is_same(a, b)))
}

fn is_same(a: Stat, b: Stat) -> bool {
    (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
}

fn link(file: &File, to: &Path) -> io::Result<()> {
    Ok(rustix::fs::linkat(CWD, descriptor_path(file), CWD, to, AtFlags::SYMLINK_FOLLOW)?)
}

#[derive(Default)]
struct TemporaryNames {
    paths: Vec<PathBuf>,
    /// True at process exit; no new temporary names are created then.
    closed: bool,
}

/// Temporary names in use by this process. Innermost lock, held while a name is created or removed.
static NAMES: LazyLock<Mutex<TemporaryNames>> = LazyLock::new(Mutex::default);

/// A temporary name of a file. Dropping this value removes the file.
#[derive(Debug)]
struct TemporaryName(Option<TempPath>);

impl TemporaryName {
    fn new<R>(dir: &Path, prefix: &str, make: impl FnMut(&Path) -> io::Result<R>) -> io::Result<(R, Self)> {
        let mut names = NAMES.lock();
        if names.closed {
            return Err(io::Error::other("the process is shutting down"));
        }
        let file = tempfile::Builder::new().prefix(prefix).suffix(SUFFIX).make_in(dir, make)?;
        let (file, path) = file.into_parts();
        names.paths.push(path.to_path_buf());
        Ok((file, Self(Some(path))))
    }

    /// Renames the file to `to`. Unless `over` is true, fails if `to` exists. The error includes the
    /// temporary name if the name is still in use.
    fn rename(mut self, to: &Path, over: bool) -> Result<(), (io::Error, Option<Self>)> {
        let mut names = NAMES.lock();
        let Some(path) = self.0.take() else { return Ok(()) };
        let from = path.to_path_buf();
        // A failed call returns the temporary path.
        let mut path = Some(path);
        let renamed = fail_points::call(Call::Place, || {
            let Some(own) = path.take() else { return Ok(()) };
            let renamed = if over { own.persist(to) } else { own.persist_noclobber(to) };
            renamed.map_err(|failed| {
                path = Some(failed.path);
                failed.error
            })
        });
        let outcome = renamed.map_err(|error| (error, path.map(|path| Self(Some(path)))));
        if !matches!(outcome, Err((_, Some(_)))) {
            names.paths.retain(|path| *path != from);
        }
        drop(names);
        outcome
    }
}

impl Drop for TemporaryName {
    fn drop(&mut self) {
        let Some(path) = self.0.take() else { return };
        let mut names = NAMES.lock();
        names.paths.retain(|other| **other != *path);
        // An error is ignored, because `find_stale_files` finds the file later.
        let _ = path.close();
    }
}

/// Removes all temporary names and prevents new ones, for a process that exits without waiting for its
/// threads.
pub fn remove_temporary_files() {
    let mut names = NAMES.lock();
    names.closed = true;
    for path in names.paths.drain(..) {
        // An error is ignored, because `find_stale_files` finds the file later.
        let _ = fs::remove_file(path);
    }
}

/// Returns temporary files in the directory of `file` that a crash left. These files can be removed.
pub fn find_stale_files(file: &Path) -> Vec<PathBuf> {
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Files that cannot be examined are omitted, because they may be in use.
    let Ok(rows) = fs::read_dir(dir) else { return Vec::new() };
    let mut left: Vec<PathBuf> = rows
        .filter_map(Result::ok)
        .filter(|row| is_temporary(&row.file_name()) && row.file_type().is_ok_and(|kind| kind.is_file()))
        .map(|row| row.path())
        .filter(|path| is_unlocked(path))
        .collect();
    left.sort();
    left
}

fn is_temporary(name: &OsStr) -> bool {
    let name = name.as_bytes();
    name.ends_with(SUFFIX.as_bytes()) && PREFIXES.iter().any(|prefix| name.starts_with(prefix.as_bytes()))
}

fn is_unlocked(path: &Path) -> bool {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let Ok(file) = File::options().read(true).custom_flags(flags).open(path) else { return false };
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

#[cfg(test)]
mod tests;
