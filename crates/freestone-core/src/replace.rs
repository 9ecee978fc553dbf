//! Files that are written beside their place until they are complete and durable, and then put
//! there: what stands there is the old file or the new one at any moment, also after a crash.
//!
//! Until then a file has no name, so that nothing is left of it however the process ends. A file
//! cannot take another's name in one step without one, so where there is an old file it has one for
//! that moment; and where the file system has no nameless files, from the beginning. Such a name
//! that a crash leaves is told by [`left_behind`].

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

/// How the names begin that unfinished files have.
const PREFIXES: [&str; 4] = [SAVE_PREFIX, DELTA_PREFIX, STATE_PREFIX, NEW_PREFIX];
/// Of saved devices.
pub const SAVE_PREFIX: &str = ".freestone-save-";
/// Of deltas.
pub const DELTA_PREFIX: &str = ".freestone-delta-";
/// Of states of zones.
pub const STATE_PREFIX: &str = ".freestone-zones-";
/// Of new images and logs of writes.
pub const NEW_PREFIX: &str = ".freestone-new-";
/// How all of them end.
const SUFFIX: &str = ".tmp";
/// Bytes of a file by which it is known.
const HEAD_BYTES: u64 = 64;
/// How often it is tried again when others come and go at a place.
const TRIES: u32 = 16;
/// How long somebody else who is just replacing the file is waited for.
const REPLACED_MAX: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Which file that lies at its place a new one may replace. None ever that this process, another
/// Freestone or qemu has open, and nothing that is not a regular file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Replace {
    /// One of the same kind, or an empty one.
    #[default]
    SameKind,
    /// Any.
    Any,
}

/// What [`Place::put`] may do away with.
#[derive(Debug, Clone, Copy)]
pub enum MayGo {
    /// There must be nothing.
    Nothing,
    /// Whatever is there.
    Any,
    /// An empty file, and one whose first bytes are such.
    Only {
        /// Whether they are.
        are: fn(&[u8]) -> bool,
        /// What such files are called.
        kind: &'static str,
    },
}

impl Replace {
    /// What may go, where files of the kind begin with bytes that `are` so.
    pub fn may_go(self, kind: &'static str, are: fn(&[u8]) -> bool) -> MayGo {
        match self {
            Self::SameKind => MayGo::Only { are, kind },
            Self::Any => MayGo::Any,
        }
    }
}

/// Whether a file that was [put](Place::put) in its place stays there after a crash.
#[derive(Debug)]
#[must_use]
pub enum Durability {
    /// The file and its name are durable.
    Durable,
    /// The new file is in its place, or may be, and a crash can bring the old state back: why.
    /// A later fsync that succeeds does not settle that; only another file does.
    Unknown(io::Error),
}

impl Durability {
    /// Returns an error unless the name is durable.
    ///
    /// # Errors
    /// The reason, of the same kind.
    pub fn into_result(self) -> io::Result<()> {
        let Self::Unknown(error) = self else { return Ok(()) };
        let why = format!(
            "the new file may be in its place, and a crash may bring the old one back; write it again: {error}"
        );
        Err(io::Error::new(error.kind(), why))
    }
}

/// The place of a file that is to be replaced, or made.
#[derive(Debug)]
pub struct Place {
    /// Absolute, and no symbolic link.
    pub path: PathBuf,
    /// The directory.
    pub dir: PathBuf,
}

/// The old file at a place, locked so that nobody opens it before it is gone.
struct Old {
    locked: File,
}

impl Drop for Old {
    fn drop(&mut self) {
        file_locks::unlock(self.locked.as_fd());
    }
}

/// What is at a place.
enum Look {
    There(Option<Old>),
    /// Somebody uses it, or is just replacing it.
    Locked,
}

impl Place {
    /// The place `to`, where a regular file is, or nothing.
    pub fn new(to: &Path) -> io::Result<Self> {
        let path = match fs::metadata(to) {
            Ok(found) if found.is_file() => fs::canonicalize(to)?,
            Ok(_) => return Err(no_file()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                match fs::symlink_metadata(to) {
                    Ok(_) => return Err(io::Error::other("there is a symbolic link that leads nowhere")),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
                let name = to.file_name().ok_or_else(|| io::Error::other("this is no file name"))?;
                let dir = to.parent().filter(|dir| !dir.as_os_str().is_empty());
                fs::canonicalize(dir.unwrap_or(Path::new(".")))?.join(name)
            }
            Err(error) => return Err(error),
        };
        let dir = path.parent().map_or_else(|| PathBuf::from("/"), Path::to_owned);
        Ok(Self { path, dir })
    }

    /// Refuses where the file that is there may not go: before the work, as [`put`](Self::put) will
    /// after it.
    pub fn check(&self, may_go: MayGo) -> io::Result<()> {
        self.old(may_go).map(drop)
    }

    fn old(&self, may_go: MayGo) -> io::Result<Option<Old>> {
        let until = Instant::now() + REPLACED_MAX;
        loop {
            match self.look(may_go)? {
                Look::There(old) => return Ok(old),
                Look::Locked if Instant::now() < until => thread::sleep(LOOK_AGAIN),
                Look::Locked => {
                    let why = "it is in use by another process";
                    return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
                }
            }
        }
    }

    fn look(&self, may_go: MayGo) -> io::Result<Look> {
        // Nonblocking: what has come there since may be a pipe.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let mut file = match File::options().read(true).custom_flags(flags).open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Look::There(None)),
            Err(error) => return Err(error),
        };
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(no_file());
        }
        if file_locks::is_held(&stat) {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "it is open in this server"));
        }
        match file_locks::lock(file.as_fd(), Access::Write) {
            // A file system without locks.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(Errno::WOULDBLOCK) => return Ok(Look::Locked),
            Err(errno) => {
                let error = io::Error::from(errno);
                let why = format!("cannot see whether the file there is in use: {error}");
                return Err(io::Error::new(error.kind(), why));
            }
        }
        let taken = |why: String| Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        match may_go {
            MayGo::Any => {}
            MayGo::Nothing => return taken("it is there already".to_owned()),
            MayGo::Only { are, kind } => {
                let mut head = Vec::new();
                file.by_ref().take(HEAD_BYTES).read_to_end(&mut head)?;
                if !head.is_empty() && !are(&head) {
                    return taken(format!("it is there, and is no {kind}"));
                }
            }
        }
        Ok(Look::There(Some(Old { locked: file })))
    }

    /// A file for this process's user alone; it is gone when it is dropped. Its name, if it must
    /// have one, begins with `prefix`.
    pub fn begin(&self, prefix: &'static str) -> io::Result<Unfinished> {
        // Opened before the work: afterwards only the fsync can fail.
        let dir = self.open_dir()?;
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let (file, name) = match rustix::fs::open(&self.dir, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) if can_be_named(&fd) => (File::from(fd), None),
            // The file system, or the kernel, has no such files; or they cannot get a name later.
            Ok(_) | Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let mut options = File::options();
                options.read(true).write(true).create_new(true).mode(0o600);
                let (file, name) = Name::new(&self.dir, prefix, |path| options.open(path))?;
                (file, Some(name))
            }
            Err(errno) => return Err(errno.into()),
        };
        // By that others see that it is not left behind.
        let _ = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
        Ok(Unfinished { file, name, prefix, dir })
    }

    /// Makes the file durable, and puts it in the old one's place, unless that may not go.
    ///
    /// # Errors
    /// The place is as it was.
    pub fn put(&self, unfinished: Unfinished, may_go: MayGo) -> io::Result<Durability> {
        let Unfinished { file, mut name, prefix, dir } = unfinished;
        fail_points::call(Call::SyncFile, || file.sync_all())?;
        for _ in 0..TRIES {
            let old = self.old(may_go)?;
            let placed = match (name.take(), &old) {
                (Some(name), _) => name.rename(&self.path, old.is_some()),
                (None, Some(_)) => {
                    Name::new(&self.dir, prefix, |path| link(&file, path))?.1.rename(&self.path, true)
                }
                (None, None) => {
                    fail_points::call(Call::Place, || link(&file, &self.path)).map_err(|error| (error, None))
                }
            };
            let Err((error, back)) = placed else { return Ok(end(file, &dir)) };
            match self.has(&file) {
                // The call failed after it was done.
                Ok(true) => return Ok(end(file, &dir)),
                // Somebody has put a file there meanwhile: it is looked at.
                Ok(false) if error.kind() == io::ErrorKind::AlreadyExists => name = back,
                Ok(false) => return Err(error),
                Err(_) => return Ok(Durability::Unknown(error)),
            }
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, "others keep putting files there"))
    }

    /// Gives a complete file its name, durably. The file returned is still open, and locked as it
    /// was. If the name cannot be made durable it is removed again.
    ///
    /// # Errors
    /// [`AlreadyExists`](io::ErrorKind::AlreadyExists): something lies there; the system's.
    pub fn put_new(&self, unfinished: Unfinished) -> io::Result<File> {
        let made = unfinished.made(self)?;
        let Unfinished { file, name, dir, .. } = unfinished;
        fail_points::call(Call::SyncFile, || file.sync_all())?;
        let placed = match name {
            None => fail_points::call(Call::Place, || link(&file, &self.path)),
            Some(name) => name.rename(&self.path, false).map_err(|(error, _)| error),
        };
        // A call that failed may have been done.
        placed.and_then(|()| sync_dir(&dir)).inspect_err(|_| made.remove())?;
        Ok(file)
    }

    /// Returns true if the place holds this file.
    fn has(&self, file: &File) -> io::Result<bool> {
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

    /// Makes it durable that the file has this name.
    pub fn keep_name(&self) -> io::Result<()> {
        sync_dir(&self.open_dir()?)
    }
}

/// Ends the work on a file that is in its place: whoever wants to may open it.
fn end(file: File, dir: &File) -> Durability {
    // Closing would do, but a program that is just being started has the file until it runs.
    file_locks::unlock(file.as_fd());
    drop(file);
    match sync_dir(dir) {
        Ok(()) => Durability::Durable,
        Err(error) => Durability::Unknown(error),
    }
}

/// Makes the names in a directory durable.
///
/// # Errors
/// The names may be there after a crash, or not.
pub fn sync_dir(dir: &File) -> io::Result<()> {
    fail_points::call(Call::SyncDir, || dir.sync_all())
}

fn no_file() -> io::Error {
    io::Error::other("there is something else than a file")
}

/// A file that is not in its place.
#[derive(Debug)]
pub struct Unfinished {
    file: File,
    name: Option<Name>,
    prefix: &'static str,
    dir: File,
}

impl Unfinished {
    /// The file, without a name yet or with a temporary one.
    pub const fn as_file(&self) -> &File {
        &self.file
    }

    /// Returns the file as it will lie at `place`.
    pub fn made(&self, place: &Place) -> io::Result<MadeFile> {
        let stat = rustix::fs::fstat(&self.file)?;
        Ok(MadeFile { path: place.path.clone(), inode: (stat.st_dev, stat.st_ino) })
    }
}

/// A file that this process put at a path, to be removed if what needs it fails.
#[derive(Debug, Clone)]
pub struct MadeFile {
    path: PathBuf,
    /// File system and inode.
    inode: (u64, u64),
}

impl MadeFile {
    /// Removes the file, unless another one lies at its path.
    pub fn remove(&self) {
        let removed = match rustix::fs::lstat(&self.path) {
            Ok(stat) if (stat.st_dev, stat.st_ino) == self.inode => fs::remove_file(&self.path),
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        };
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "a new file that is not used cannot be removed");
        }
    }
}

/// Where a file without a name is found, to give it one.
fn by_descriptor(file: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn can_be_named(file: &(impl AsRawFd + AsFd)) -> bool {
    // Without /proc there is no way that needs no privilege.
    rustix::fs::fstat(file).is_ok_and(|a| rustix::fs::stat(by_descriptor(file)).is_ok_and(|b| is_same(a, b)))
}

fn is_same(a: Stat, b: Stat) -> bool {
    (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
}

fn link(file: &File, to: &Path) -> io::Result<()> {
    Ok(rustix::fs::linkat(CWD, by_descriptor(file), CWD, to, AtFlags::SYMLINK_FOLLOW)?)
}

/// The names that unfinished files have in this process.
#[derive(Default)]
struct Names {
    paths: Vec<PathBuf>,
    /// The process ends: there are to be no more.
    closed: bool,
}

/// Held while a name is made or goes. Nothing is taken under it.
static NAMES: LazyLock<Mutex<Names>> = LazyLock::new(Mutex::default);

/// The name of an unfinished file; the file goes with it.
#[derive(Debug)]
struct Name(Option<TempPath>);

impl Name {
    fn new<R>(dir: &Path, prefix: &str, make: impl FnMut(&Path) -> io::Result<R>) -> io::Result<(R, Self)> {
        let mut names = NAMES.lock();
        if names.closed {
            return Err(io::Error::other("the process is about to end"));
        }
        let file = tempfile::Builder::new().prefix(prefix).suffix(SUFFIX).make_in(dir, make)?;
        let (file, path) = file.into_parts();
        names.paths.push(path.to_path_buf());
        Ok((file, Self(Some(path))))
    }

    /// Makes it `to`. Without `over`, only where nothing is there.
    fn rename(mut self, to: &Path, over: bool) -> Result<(), (io::Error, Option<Self>)> {
        let mut names = NAMES.lock();
        let Some(path) = self.0.take() else { return Ok(()) };
        let from = path.to_path_buf();
        // Each failure gives the path back.
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

impl Drop for Name {
    fn drop(&mut self) {
        let Some(path) = self.0.take() else { return };
        let mut names = NAMES.lock();
        names.paths.retain(|other| **other != *path);
        // Nothing can be done about a failure; who comes next is told of it.
        let _ = path.close();
    }
}

/// Removes the names of all unfinished files, and lets none come after that: for a process that
/// ends and waits for nobody.
pub fn abandon() {
    let mut names = NAMES.lock();
    names.closed = true;
    for path in names.paths.drain(..) {
        // As above.
        let _ = fs::remove_file(path);
    }
}

/// Unfinished files beside `file` that nobody works on: a crash left them. They can be removed.
pub fn left_behind(file: &Path) -> Vec<PathBuf> {
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // What cannot be looked at is not known to be left behind.
    let Ok(rows) = fs::read_dir(dir) else { return Vec::new() };
    let mut left: Vec<PathBuf> = rows
        .filter_map(Result::ok)
        .filter(|row| is_unfinished(&row.file_name()) && row.file_type().is_ok_and(|kind| kind.is_file()))
        .map(|row| row.path())
        .filter(|path| nobody_has(path))
        .collect();
    left.sort();
    left
}

fn is_unfinished(name: &OsStr) -> bool {
    let name = name.as_bytes();
    name.ends_with(SUFFIX.as_bytes()) && PREFIXES.iter().any(|prefix| name.starts_with(prefix.as_bytes()))
}

fn nobody_has(path: &Path) -> bool {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let Ok(file) = File::options().read(true).custom_flags(flags).open(path) else { return false };
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

#[cfg(test)]
mod tests;
