//! Unix sockets that servers listen at, and their files.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use thiserror::Error;

/// Longest path of a Unix socket in bytes (`sun_path` less its end).
pub const MAX_SOCKET_PATH_BYTES: usize = 107;
/// How long another process that makes a socket in the same directory is waited for.
const DIRECTORY_LOCK_WAIT: Duration = Duration::from_secs(1);
/// The first and the longest pause between two attempts at that: it is held for some 30 µs.
const DIRECTORY_LOCK_PAUSES: Range<Duration> = Duration::from_micros(50)..Duration::from_millis(5);

/// Why nobody can listen at a path.
#[derive(Debug, Error)]
pub enum BindError {
    /// Somebody accepts connections there.
    #[error("another server listens there")]
    InUse,
    /// It is taken by something that is no socket; that is left alone.
    #[error("the path is taken by something that is no socket")]
    NotASocket,
    /// Not allowed.
    #[error("permission denied")]
    Permission,
    /// It does not fit into a socket address.
    #[error("the path has {0} bytes, a socket's path at most {MAX_SOCKET_PATH_BYTES}")]
    PathTooLong(usize),
    /// Its directory is missing, or is no directory.
    #[error("there is no such directory")]
    NoDirectory,
    /// Anything else, for example no file descriptors.
    #[error("{0}")]
    Other(#[from] io::Error),
}

impl From<Errno> for BindError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Self::Permission,
            Errno::NOENT | Errno::NOTDIR => Self::NoDirectory,
            Errno::ADDRINUSE => Self::InUse,
            errno => Self::Other(errno.into()),
        }
    }
}

/// The file of a Unix socket; removed on drop.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

/// Listens at a path with mode 0600; a socket at which nobody accepts any more is replaced. The
/// socket does not block. `backlog` connections wait to be accepted; the kernel may allow fewer.
///
/// # Errors
/// See [`BindError`].
pub fn bind_to(path: &Path, backlog: i32) -> Result<(OwnedFd, SocketFile), BindError> {
    let len = path.as_os_str().len();
    if len > MAX_SOCKET_PATH_BYTES {
        return Err(BindError::PathTooLong(len));
    }
    let name = SocketAddrUnix::new(path)?;
    let new_socket = || {
        let socket = new_socket()?;
        // Linux gives the file the mode of the socket, so at no moment may others connect.
        fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        Ok::<_, Errno>(socket)
    };
    // Two servers that replace one stale socket must not remove each other's.
    let _lock = lock_directory(path.parent());
    let mut socket = new_socket()?;
    if let Err(errno) = bind(&socket, &name) {
        if errno != Errno::ADDRINUSE {
            return Err(errno.into());
        }
        remove_stale(path, &name)?;
        socket = new_socket()?;
        bind(&socket, &name)?;
    }
    let metadata = fs::symlink_metadata(path)?;
    let file = SocketFile { path: path.to_path_buf(), identity: (metadata.dev(), metadata.ino()) };
    listen(&socket, backlog)?;
    Ok((socket, file))
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Removes a socket at which nobody accepts.
fn remove_stale(path: &Path, name: &SocketAddrUnix) -> Result<(), BindError> {
    match fs::symlink_metadata(path) {
        // Removed by its server meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.into()),
        Ok(metadata) if !metadata.file_type().is_socket() => return Err(BindError::NotASocket),
        Ok(_) => {}
    }
    let probe = new_socket().map_err(io::Error::from)?;
    match connect(&probe, name) {
        Err(Errno::CONNREFUSED) => {}
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ACCESS | Errno::PERM) => return Err(BindError::Permission),
        // Also a full backlog (EAGAIN), or a socket of another type (EPROTOTYPE): somebody is
        // there.
        Ok(()) | Err(_) => return Err(BindError::InUse),
    }
    tracing::info!(path = %path.display(), "replacing a socket at which nobody listens");
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(BindError::Permission),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Held while a socket is made in the directory. Best effort: a directory that cannot be read is
/// not locked.
fn lock_directory(directory: Option<&Path>) -> Option<File> {
    let directory = directory.filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = File::open(directory).ok()?;
    let deadline = Instant::now() + DIRECTORY_LOCK_WAIT;
    let mut pause = DIRECTORY_LOCK_PAUSES.start;
    while let Err(Errno::WOULDBLOCK) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(DIRECTORY_LOCK_PAUSES.end);
    }
    Some(file)
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // By now the path may be another's.
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.identity);
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the socket could not be removed");
        }
    }
}
