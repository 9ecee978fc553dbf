//! Unix sockets that servers listen at, and their files.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, FileType, FlockOperation, Gid, Mode, OFlags, Uid, chmod, chownat, fchmod, flock, fstat,
    openat,
};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use thiserror::Error;

/// Longest path of a Unix socket in bytes (`sun_path` less its end).
pub const MAX_SOCKET_PATH_BYTES: usize = 107;
/// What a socket's file may be used for before it is anybody else's: mode 0600.
pub const OWN_MODE: u32 = 0o600;
/// How long another process that makes a socket in the same directory is waited for.
const DIRECTORY_LOCK_WAIT: Duration = Duration::from_secs(1);
/// The first and the longest pause between two attempts at that: it is held for some 30 µs.
const DIRECTORY_LOCK_PAUSES: Range<Duration> = Duration::from_micros(50)..Duration::from_millis(5);

/// Who may connect to a socket: the kernel asks for the right to write its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// Permission bits of the file.
    pub mode: u32,
    /// The number of its owner; that of who makes it where it is not given.
    pub user: Option<u32>,
    /// The number of its group, likewise.
    pub group: Option<u32>,
}

/// Only who makes it, and root.
impl Default for Access {
    fn default() -> Self {
        Self { mode: OWN_MODE, user: None, group: None }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mode {:04o}", self.mode)?;
        self.user.iter().try_for_each(|user| write!(f, ", user {user}"))?;
        self.group.iter().try_for_each(|group| write!(f, ", group {group}"))
    }
}

impl Access {
    /// Gives the file of a socket that was just made, with [`OWN_MODE`], to these.
    ///
    /// # Errors
    /// The file is not the socket of this process, or the system refuses.
    pub fn give(&self, path: &Path) -> io::Result<()> {
        if *self == Self::default() {
            return Ok(());
        }
        let file = openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let found = fstat(&file)?;
        // Who may write in the directory may have put something else there meanwhile.
        if FileType::from_raw_mode(found.st_mode) != FileType::Socket
            || found.st_uid != rustix::process::geteuid().as_raw()
            || found.st_nlink != 1
        {
            return Err(io::Error::other("the path was taken by something else"));
        }
        if self.user.is_some() || self.group.is_some() {
            let (user, group) = (self.user.map(Uid::from_raw), self.group.map(Gid::from_raw));
            chownat(&file, "", user, group, AtFlags::EMPTY_PATH)?;
        }
        // After the owner: the bits of the group are never another group's.
        if self.mode != OWN_MODE {
            // By way of the descriptor, which itself takes no mode.
            chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), Mode::from_raw_mode(self.mode))?;
        }
        Ok(())
    }
}

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
    /// Its owner, group or mode cannot be set.
    #[error("the socket cannot be given {access}: {source}")]
    Access {
        /// What was to be set.
        access: Access,
        /// What the system says.
        source: io::Error,
    },
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

/// Listens at a path, to which only those may connect to whom `access` gives it; a socket at which
/// nobody accepts any more is replaced. The socket does not block. `backlog` connections wait to be accepted; the kernel may allow fewer.
///
/// # Errors
/// See [`BindError`].
pub fn bind_to(path: &Path, backlog: i32, access: &Access) -> Result<(OwnedFd, SocketFile), BindError> {
    let len = path.as_os_str().len();
    if len > MAX_SOCKET_PATH_BYTES {
        return Err(BindError::PathTooLong(len));
    }
    let name = SocketAddrUnix::new(path)?;
    let new_socket = || {
        let socket = new_socket()?;
        // Linux gives the file the mode of the socket, so at no moment may others connect.
        fchmod(&socket, Mode::from_raw_mode(OWN_MODE))?;
        Ok::<_, Errno>(socket)
    };
    // Two servers that replace one stale socket must not remove each other's.
    let lock = lock_directory(path.parent());
    let mut socket = new_socket()?;
    if let Err(errno) = bind(&socket, &name) {
        if errno != Errno::ADDRINUSE {
            return Err(errno.into());
        }
        remove_stale(path, &name, lock.as_ref().err())?;
        socket = new_socket()?;
        bind(&socket, &name)?;
    }
    let metadata = fs::symlink_metadata(path)?;
    let file = SocketFile { path: path.to_path_buf(), identity: (metadata.dev(), metadata.ino()) };
    // Until it listens nobody can connect at all.
    access.give(path).map_err(|source| BindError::Access { access: *access, source })?;
    listen(&socket, backlog)?;
    Ok((socket, file))
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Removes a socket at which nobody accepts, unless the lock of its directory failed.
fn remove_stale(path: &Path, name: &SocketAddrUnix, unlocked: Option<&Errno>) -> Result<(), BindError> {
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
    // By now another server may have replaced the socket.
    if let Some(errno) = unlocked {
        let why = "the socket there has no listener and is not replaced, as its directory cannot be locked";
        return Err(io::Error::other(format!("{why}: {errno}")).into());
    }
    tracing::info!(path = %path.display(), "replacing a socket at which nobody listens");
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(BindError::Permission),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Locks the directory while a socket is made in it. Returns `None` if the directory never can be locked: it
/// may not be read, its file system has no locks, or another program keeps it locked.
///
/// # Errors
/// The lock failed for a reason that may pass, such as a lack of file descriptors.
fn lock_directory(directory: Option<&Path>) -> Result<Option<File>, Errno> {
    let directory = directory.filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let file = match openat(CWD, directory, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::ACCESS | Errno::PERM) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    let deadline = Instant::now() + DIRECTORY_LOCK_WAIT;
    let mut pause = DIRECTORY_LOCK_PAUSES.start;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(file)),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOLCK | Errno::INVAL) => return Ok(None),
            // A server that makes a socket holds the lock far shorter.
            Err(Errno::WOULDBLOCK) if Instant::now() >= deadline => return Ok(None),
            Err(Errno::WOULDBLOCK | Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(DIRECTORY_LOCK_PAUSES.end);
    }
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_has_the_mode_and_the_owner_that_were_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        for mode in [0o600, 0o660, 0o666, 0o777, 0o620] {
            let access = Access { mode, user: Some(uid), group: Some(gid) };
            let (_socket, _file) = bind_to(&path, 1, &access).unwrap();
            let found = fs::metadata(&path).unwrap();
            assert_eq!((found.permissions().mode() & 0o7777, found.uid(), found.gid()), (mode, uid, gid));
        }
        assert!(!path.exists());
        if rustix::process::geteuid().is_root() {
            let access = Access { mode: 0o660, user: Some(65534), group: Some(65533) };
            let (_socket, _file) = bind_to(&path, 1, &access).unwrap();
            let found = fs::metadata(&path).unwrap();
            assert_eq!((found.uid(), found.gid()), (65534, 65533));
        } else {
            let access = Access { user: Some(0), ..Access::default() };
            assert!(matches!(bind_to(&path, 1, &access), Err(BindError::Access { .. })));
        }
        assert!(!path.exists());
    }

    /// Looks at the file as often as it can while sockets are made.
    #[test]
    fn at_no_time_has_a_socket_more_rights_than_asked() {
        const SOCKETS: usize = 300;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let group =
            if rustix::process::geteuid().is_root() { 65533 } else { rustix::process::getegid().as_raw() };
        let access = Access { mode: 0o660, user: None, group: Some(group) };
        let done = std::sync::atomic::AtomicUsize::new(0);
        let count = || done.load(std::sync::atomic::Ordering::SeqCst);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..SOCKETS {
                    let bound = bind_to(&path, 1, &access);
                    done.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    bound.unwrap();
                }
            });
            while count() < SOCKETS {
                let Ok(found) = fs::symlink_metadata(&path) else { continue };
                let mode = found.permissions().mode() & 0o777;
                assert!(
                    mode == 0o600 || (mode == 0o660 && found.gid() == group),
                    "{mode:o}, group {}",
                    found.gid()
                );
            }
        });
    }

    #[test]
    fn only_a_socket_of_ours_is_given_away() {
        let dir = tempfile::tempdir().unwrap();
        let access = Access { mode: 0o666, ..Access::default() };
        let (file, link, socket) = (dir.path().join("f"), dir.path().join("l"), dir.path().join("s"));
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let _listener = UnixListener::bind(&socket).unwrap();
        symlink(&socket, &link).unwrap();
        for other in [&file, &link] {
            assert!(access.give(other).unwrap_err().to_string().contains("something else"));
        }
        fs::hard_link(&socket, dir.path().join("h")).unwrap();
        assert!(access.give(&socket).is_err());
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn socket_without_listener_is_replaced_only_under_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let name = SocketAddrUnix::new(&path).unwrap();
        drop(UnixListener::bind(&path).unwrap());
        let refused = remove_stale(&path, &name, Some(&Errno::MFILE)).unwrap_err().to_string();
        assert!(refused.contains("cannot be locked: Too many open files"), "{refused}");
        assert!(path.exists());
        remove_stale(&path, &name, None).unwrap();
        assert!(!path.exists());
        assert!(lock_directory(Some(dir.path())).unwrap().is_some());
        assert_eq!(lock_directory(Some(&path)).unwrap_err(), Errno::NOENT);
    }
}
