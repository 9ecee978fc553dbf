//! A Unix socket at a path, with access rights, that only one server can own.
//!
//! The socket is bound in a private directory, where its owner and mode are set, and is then renamed to its path. A
//! file lock on the directory of that path serializes servers that start at the same time.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail};
use freestone_nbd::Access;
use rustix::fs::{FlockOperation, flock};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Longest path of a Unix socket, in bytes: `sun_path` without its terminating zero.
const MAX_PATH_BYTES: usize = 107;
/// Number of attempts to lock the directory, with a pause of [`LOCK_PAUSE`] between them: 2 s in total.
const LOCK_TRIES: usize = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// Prefix of the name of the private directory in which a socket is bound. The next constants are the number of random
/// letters after the prefix, the directory's mode, and the name of the socket in the directory.
const PRIVATE_DIR_PREFIX: &str = ".freestone-";
const PRIVATE_DIR_LETTERS: usize = 6;
const PRIVATE_DIR_MODE: u32 = 0o700;
const SOCKET_NAME: &str = "s";

/// Fails if the path is too long for a socket.
pub fn check_length(path: &Path) -> Result<()> {
    if path.as_os_str().len() > MAX_PATH_BYTES {
        bail!("{}: too long for a socket; at most {MAX_PATH_BYTES} bytes", path.display());
    }
    Ok(())
}

/// The path of a socket that this process owns. Dropping it removes the path.
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    /// Identity of the socket, so that another server's socket at the same path is not removed.
    identity: Identity,
}

/// Identity of a file: device, inode, and birth time if the file system records it, because inode numbers are reused.
pub type Identity = (u64, u64, Option<SystemTime>);

/// Returns the identity of the file at `path`.
pub fn identity(path: &Path) -> io::Result<Identity> {
    fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino(), meta.created().ok()))
}

impl SocketPath {
    /// Takes ownership of the socket that is at `path` now.
    pub fn adopt(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.into(), identity: identity(path)? })
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true if the file at the path is still this socket.
    pub fn is_there(&self) -> bool {
        identity(&self.path).is_ok_and(|found| found == self.identity)
    }

    /// Connects to the socket, without waiting for room in its backlog.
    pub fn connect(&self) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(&self.path)?)?;
        Ok(socket)
    }

    /// Removes the path if the file there is still this socket.
    pub fn remove(&self) {
        if self.is_there() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for SocketPath {
    fn drop(&mut self) {
        self.remove();
    }
}

/// A listening socket. Dropping it closes the socket and removes its path.
#[derive(Debug)]
pub struct PrivateSocket {
    listener: UnixListener,
    path: SocketPath,
}

impl PrivateSocket {
    /// Checks that [`bind`](Self::bind) would work, and removes a stale socket. A socket that appears at the path
    /// afterwards belongs to a server that is ready.
    pub fn clear(path: &Path) -> Result<()> {
        let at = path.display();
        let _lock = lock_for(path)?;
        if check_not_in_use(path)? {
            fs::remove_file(path).with_context(|| format!("{at}: cannot remove the old control socket"))?;
        }
        Ok(())
    }

    /// Listens at `path` with the owner and mode of `access`. Replaces a stale socket; fails if a server listens
    /// there, or if the path is not a socket.
    pub fn bind(path: &Path, access: &Access) -> Result<Self> {
        let at = path.display();
        // Without the lock, two servers that start at the same time could both find the path free.
        let lock = lock_for(path)?;
        check_not_in_use(path)?;
        remove_private_dirs(parent(path)?, &lock);
        let listener = bind_private(parent(path)?, path, access)
            .with_context(|| format!("{at}: cannot create the control socket"))?;
        let path =
            SocketPath::adopt(path).with_context(|| format!("{at}: cannot look at the control socket"))?;
        Ok(Self { listener, path })
    }

    /// Takes over the socket of the predecessor in this process. Listens anew if no socket is at `path`.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn inherit(socket: OwnedFd, path: &Path, access: &Access) -> Result<Self> {
        match SocketPath::adopt(path) {
            Ok(path) => Ok(Self { listener: socket.into(), path }),
            Err(_) => Self::bind(path, access),
        }
    }

    /// Returns the listening socket.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &SocketPath {
        &self.path
    }
}

fn parent(path: &Path) -> Result<&Path> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Ok(Path::new(".")),
        Some(parent) => Ok(parent),
        None => bail!("{}: not the path of a socket", path.display()),
    }
}

/// Locks the directory of a socket. Closing the returned file releases the lock.
fn lock_for(path: &Path) -> Result<File> {
    check_length(path)?;
    lock_dir(parent(path)?).with_context(|| format!("{}: cannot create the control socket", path.display()))
}

fn lock_dir(dir: &Path) -> io::Result<File> {
    let file = File::open(dir)?;
    for _ in 1..LOCK_TRIES {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(LOCK_PAUSE),
            other => return other.map(|()| file).map_err(Into::into),
        }
    }
    Err(io::Error::new(io::ErrorKind::WouldBlock, "another program holds a lock on the directory"))
}

/// Fails if a server listens at the path, or the path is not a socket. Returns true for a stale socket, and false if
/// the path does not exist.
fn check_not_in_use(path: &Path) -> Result<bool> {
    let at = path.display();
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(e).with_context(|| format!("{at}: cannot create the control socket")),
        Ok(meta) if !meta.file_type().is_socket() => bail!("{at}: exists and is not a socket"),
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(socket) => {
            let pid = socket_peercred(&socket).map(|peer| format!(" (pid {})", peer.pid)).unwrap_or_default();
            bail!("{at}: is in use by another server{pid}; stop it, or name another path with --control")
        }
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => Ok(true),
        Err(e) => Err(e).with_context(|| format!("{at}: cannot find out whether a server listens")),
    }
}

/// Removes private directories of servers that were killed while they bound a socket. The lock ensures that no
/// socket is being bound now. Only directories of this user are removed.
fn remove_private_dirs(parent: &Path, _lock: &File) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let letters = name.as_encoded_bytes().strip_prefix(PRIVATE_DIR_PREFIX.as_bytes());
        let is_leftover = letters.is_some_and(|letters| letters.len() == PRIVATE_DIR_LETTERS)
            && entry.metadata().is_ok_and(|meta| {
                let is_mine = meta.uid() == rustix::process::geteuid().as_raw();
                meta.is_dir() && is_mine && meta.mode() & 0o777 == PRIVATE_DIR_MODE
            });
        if is_leftover {
            let socket = entry.path().join(SOCKET_NAME);
            if fs::symlink_metadata(&socket).is_ok_and(|meta| meta.file_type().is_socket()) {
                drop(fs::remove_file(socket));
            }
            // Fails if the directory contains other files: the directory remains then.
            drop(fs::remove_dir(entry.path()));
        }
    }
}

/// Binds the socket in a new directory of mode 0700 and renames it to its path. So the socket never has other access
/// rights than those of `access`.
fn bind_private(parent: &Path, path: &Path, access: &Access) -> io::Result<UnixListener> {
    let dir = tempfile::Builder::new()
        .prefix(PRIVATE_DIR_PREFIX)
        .rand_bytes(PRIVATE_DIR_LETTERS)
        .permissions(Permissions::from_mode(PRIVATE_DIR_MODE))
        .tempdir_in(parent)?;
    // Bound through a descriptor, so that the directory's name does not count against the length limit of a socket's
    // path.
    let handle = File::open(dir.path())?;
    let short = PathBuf::from(format!("/proc/self/fd/{}/{SOCKET_NAME}", handle.as_fd().as_raw_fd()));
    let listener = UnixListener::bind(&short)?;
    fs::set_permissions(&short, Permissions::from_mode(0o600))?;
    let other = |error| io::Error::other(format!("cannot set {access}: {error}"));
    access.apply(&short).map_err(other)?;
    fs::rename(&short, path)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::{UnixListener, UnixStream};

    use freestone_nbd::Access;

    use super::PrivateSocket;

    #[test]
    fn bind_replaces_stale_socket_but_not_live_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let socket = PrivateSocket::bind(&path, &Access::default()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        // The private directory is gone.
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);

        let error = PrivateSocket::bind(&path, &Access::default()).unwrap_err().to_string();
        let pid = std::process::id();
        let why =
            format!("is in use by another server (pid {pid}); stop it, or name another path with --control");
        assert_eq!(error, format!("{}: {why}", path.display()));
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn bind_removes_only_leftover_private_directories() {
        let dir = tempfile::tempdir().unwrap();
        let make = |name: &str, mode: u32| {
            let path = dir.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            path
        };
        let empty = make(".freestone-000000", 0o700);
        let bound = make(".freestone-000001", 0o700);
        drop(UnixListener::bind(bound.join("s")).unwrap());
        let open_to_others = make(".freestone-000002", 0o755);
        let filled = make(".freestone-000003", 0o700);
        fs::write(filled.join("s"), "precious").unwrap();
        let other = make("freestone", 0o700);
        let _socket = PrivateSocket::bind(&dir.path().join("c"), &Access::default()).unwrap();
        assert!(!empty.exists() && !bound.exists());
        assert!(open_to_others.exists() && filled.join("s").exists() && other.exists());
    }

    #[test]
    fn drop_keeps_another_servers_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        let first = PrivateSocket::bind(&path, &Access::default()).unwrap();
        fs::remove_file(&path).unwrap();
        let second = PrivateSocket::bind(&path, &Access::default()).unwrap();
        drop(first);
        UnixStream::connect(&path).unwrap();
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn bind_refuses_path_that_is_not_a_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        fs::write(&path, "precious").unwrap();
        assert!(
            PrivateSocket::bind(&path, &Access::default())
                .unwrap_err()
                .to_string()
                .contains("is not a socket")
        );
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        assert!(
            PrivateSocket::bind(&dir.path().join("x".repeat(120)), &Access::default())
                .unwrap_err()
                .to_string()
                .contains("107")
        );
        assert!(PrivateSocket::bind(&dir.path().join("no/c"), &Access::default()).is_err());
    }
}
