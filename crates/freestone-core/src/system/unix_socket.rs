//! Listening Unix sockets and their files: access rights, and replacement of stale sockets.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
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

use crate::allow::socket_peer;

/// Maximum length of a Unix socket's path in bytes (`sun_path` without its terminator).
pub const MAX_SOCKET_PATH_BYTES: usize = 107;
/// Mode of a socket's file until [`Access::apply`] has set the configured owner: 0600.
pub const OWN_MODE: u32 = 0o600;
/// Maximum time to wait for the directory lock of another process that creates a socket in the same
/// directory.
const DIRECTORY_LOCK_WAIT: Duration = Duration::from_secs(1);
/// First and longest pause between attempts to lock the directory. A process holds the lock for about 30 µs.
const DIRECTORY_LOCK_PAUSES: Range<Duration> = Duration::from_micros(50)..Duration::from_millis(5);

/// Owner and mode of a socket's file. The kernel requires write permission to connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// Permission bits of the socket's file.
    pub mode: u32,
    /// Numeric user id of the owner; `None` for the process's own user.
    pub user: Option<u32>,
    /// Numeric group id; `None` for the process's own group.
    pub group: Option<u32>,
}

/// By default only the process's user and root can connect.
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
    /// Sets owner and mode of a socket's file that was just created with [`OWN_MODE`].
    ///
    /// # Errors
    /// The path is not a socket of this process, or a system call failed.
    pub fn apply(&self, path: &Path) -> io::Result<()> {
        if *self == Self::default() {
            return Ok(());
        }
        let file = openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let found = fstat(&file)?;
        // A user with write access to the directory may have replaced the file.
        if FileType::from_raw_mode(found.st_mode) != FileType::Socket
            || found.st_uid != rustix::process::geteuid().as_raw()
            || found.st_nlink != 1
        {
            return Err(io::Error::other("another file has replaced the socket"));
        }
        if self.user.is_some() || self.group.is_some() {
            let (user, group) = (self.user.map(Uid::from_raw), self.group.map(Gid::from_raw));
            chownat(&file, "", user, group, AtFlags::EMPTY_PATH)?;
        }
        // The mode is set after chown, so that its group bits never apply to another group.
        if self.mode != OWN_MODE {
            set_mode(&file, self.mode)?;
        }
        Ok(())
    }

    /// Sets owner and mode of a socket's file that a predecessor of this process created, perhaps with another
    /// owner. Changes nothing if the file has them already.
    ///
    /// # Errors
    /// The path is not a socket, or a system call failed.
    pub fn reapply(&self, path: &Path) -> io::Result<()> {
        let file = openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let found = fstat(&file)?;
        // A user with write access to the directory may have replaced the file.
        if FileType::from_raw_mode(found.st_mode) != FileType::Socket || found.st_nlink != 1 {
            return Err(io::Error::other("another file has replaced the socket"));
        }
        let user = self.user.unwrap_or(rustix::process::geteuid().as_raw());
        let group = self.group.unwrap_or(rustix::process::getegid().as_raw());
        let has_owner = (found.st_uid, found.st_gid) == (user, group);
        if has_owner && found.st_mode & 0o7777 == self.mode {
            return Ok(());
        }
        if !has_owner {
            // Without this, the old mode would apply to the new group until the mode is set.
            set_mode(&file, OWN_MODE)?;
            let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
            chownat(&file, "", Some(user), Some(group), AtFlags::EMPTY_PATH)?;
        }
        set_mode(&file, self.mode)
    }
}

fn set_mode(file: &OwnedFd, mode: u32) -> io::Result<()> {
    // The mode is set through /proc, because fchmod rejects O_PATH descriptors.
    Ok(chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), Mode::from_raw_mode(mode))?)
}

/// Error from [`bind_to`].
#[derive(Debug, Error)]
pub enum BindError {
    /// Another process accepts connections at the path.
    #[error("{0}")]
    InUse(Listener),
    /// The path exists and is not a socket. The file is not changed.
    #[error("the path exists and is not a socket")]
    NotASocket,
    /// The system denies access to the path.
    #[error("permission denied")]
    Permission,
    /// Owner, group or mode of the socket cannot be set.
    #[error("the socket cannot be given {access}: {source}")]
    Access {
        /// The requested owner and mode.
        access: Access,
        /// The error of the system.
        source: io::Error,
    },
    /// The path does not fit into a socket address. Contains the length of the path in bytes.
    #[error("the path has {0} bytes; the maximum for a socket is {MAX_SOCKET_PATH_BYTES}")]
    PathTooLong(usize),
    /// The directory of the path does not exist, or is not a directory.
    #[error("the directory does not exist")]
    NoDirectory,
    /// Any other error, such as EMFILE.
    #[error("{0}")]
    Other(#[from] io::Error),
}

impl From<Errno> for BindError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Self::Permission,
            Errno::NOENT | Errno::NOTDIR => Self::NoDirectory,
            Errno::ADDRINUSE => Self::InUse(Listener(None)),
            errno => Self::Other(errno.into()),
        }
    }
}

/// Another server that listens at a path. Contains its process id, if the id can be determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listener(pub Option<i32>);

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("another server listens there")?;
        self.0.map_or(Ok(()), |process| write!(f, " (pid {process})"))
    }
}

/// The file of a listening socket. Dropping this value removes the file.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

/// Creates a non-blocking listening socket at a path, with the given access rights. Replaces a stale socket,
/// at which no process accepts connections. `backlog` is the maximum number of connections that wait to be
/// accepted; the kernel may lower it.
pub fn bind_to(path: &Path, backlog: i32, access: &Access) -> Result<(OwnedFd, SocketFile), BindError> {
    let len = path.as_os_str().len();
    if len > MAX_SOCKET_PATH_BYTES {
        return Err(BindError::PathTooLong(len));
    }
    let name = SocketAddrUnix::new(path)?;
    let new_socket = || {
        let socket = new_socket()?;
        // Linux creates the file with the mode of the socket, so other users can never connect before the
        // rights are set.
        fchmod(&socket, Mode::from_raw_mode(OWN_MODE))?;
        Ok::<_, Errno>(socket)
    };
    // Two servers that replace the same stale socket must not remove each other's new socket.
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
    let file = SocketFile::adopt(path).inspect_err(|_| {
        // No other process can have replaced the new file yet.
        let _ = fs::remove_file(path);
    })?;
    // The rights are set before `listen`, because clients cannot connect until then.
    access.apply(path).map_err(|source| BindError::Access { access: *access, source })?;
    listen(&socket, backlog)?;
    Ok((socket, file))
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Removes a socket at which no process accepts connections. `unlocked` is the error if the directory could
/// not be locked; the socket is then not removed.
fn remove_stale(path: &Path, name: &SocketAddrUnix, unlocked: Option<&Errno>) -> Result<(), BindError> {
    match fs::symlink_metadata(path) {
        // The server of the socket has removed it meanwhile.
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
        Ok(()) => {
            let process = socket_peer(probe.as_fd()).map(|peer| peer.process).filter(|process| *process > 0);
            return Err(BindError::InUse(Listener(process)));
        }
        // A full backlog (EAGAIN) or another socket type (EPROTOTYPE) shows that the socket is in use.
        Err(_) => return Err(BindError::InUse(Listener(None))),
    }
    // Without the directory lock, another server may have replaced the socket by now.
    if let Some(errno) = unlocked {
        let why = "stale socket not replaced, because its directory cannot be locked";
        return Err(io::Error::other(format!("{why}: {errno}")).into());
    }
    tracing::info!(path = %path.display(), "replacing a stale socket");
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(BindError::Permission),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Locks the directory in which a socket will be created. Returns `None` if the directory cannot be locked:
/// it is not readable, its file system has no locks, or another program keeps it locked.
///
/// # Errors
/// The lock failed for a temporary reason, such as a lack of file descriptors.
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
            // Servers hold the lock much shorter than DIRECTORY_LOCK_WAIT, so another program holds it.
            Err(Errno::WOULDBLOCK) if Instant::now() >= deadline => return Ok(None),
            Err(Errno::WOULDBLOCK | Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(DIRECTORY_LOCK_PAUSES.end);
    }
}

impl SocketFile {
    /// Takes over the file of a socket that this process, or a predecessor of this process, created.
    ///
    /// # Errors
    /// The metadata cannot be read, or the path is not a socket.
    pub fn adopt(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        if !metadata.file_type().is_socket() {
            return Err(io::Error::other("the path exists and is not a socket"));
        }
        Ok(Self { path: path.to_path_buf(), identity: (metadata.dev(), metadata.ino()) })
    }

    /// Drops the value without removing the file, which belongs to a successor of this process from now on.
    pub fn keep(self) {
        let mut kept = ManuallyDrop::new(self);
        drop(std::mem::take(&mut kept.path));
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // The path may refer to another server's socket by now.
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.identity);
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn bind_sets_mode_and_owner() {
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

    /// The test polls the mode of the socket's file while sockets are created.
    #[test]
    fn socket_never_exceeds_requested_rights() {
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
    fn kept_file_is_adopted_with_other_rights() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (socket, file) = bind_to(&path, 1, &Access { mode: 0o660, ..Access::default() }).unwrap();
        file.keep();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        for mode in [0o660, 0o600, 0o666] {
            Access { mode, user: Some(uid), group: None }.reapply(&path).unwrap();
            let found = fs::metadata(&path).unwrap();
            assert_eq!((found.permissions().mode() & 0o7777, found.uid(), found.gid()), (mode, uid, gid));
        }
        if rustix::process::geteuid().is_root() {
            let access = Access { mode: 0o660, user: Some(65534), group: Some(65533) };
            // The file has the configured owner the second time.
            for _ in 0..2 {
                access.reapply(&path).unwrap();
            }
            let found = fs::metadata(&path).unwrap();
            assert_eq!((found.uid(), found.gid()), (65534, 65533));
        }
        drop(SocketFile::adopt(&path).unwrap());
        assert!(!path.exists());
        assert!(SocketFile::adopt(&path).is_err());
        fs::write(&path, "").unwrap();
        assert!(SocketFile::adopt(&path).is_err());
        assert!(Access::default().reapply(&path).is_err());
        drop(socket);
    }

    #[test]
    fn apply_rejects_paths_other_than_own_socket() {
        let dir = tempfile::tempdir().unwrap();
        let access = Access { mode: 0o666, ..Access::default() };
        let (file, link, socket) = (dir.path().join("f"), dir.path().join("l"), dir.path().join("s"));
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let _listener = UnixListener::bind(&socket).unwrap();
        symlink(&socket, &link).unwrap();
        for other in [&file, &link] {
            assert!(access.apply(other).unwrap_err().to_string().contains("another file"));
        }
        fs::hard_link(&socket, dir.path().join("h")).unwrap();
        assert!(access.apply(&socket).is_err());
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn stale_socket_is_replaced_only_under_lock() {
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
