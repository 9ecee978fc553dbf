//! A Unix socket at a path that only those can connect to whom it is given, and that no two servers fight for.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail};
use freestone_nbd::Access;
use rustix::fs::{FlockOperation, flock};

/// Longest path of a Unix socket: `sun_path` without its terminating zero.
const MAX_PATH_BYTES: usize = 107;
/// How often the lock of the directory is tried, and the pause in between: 2 s in all.
const LOCK_TRIES: usize = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// The directory in which a socket is made: how its name begins, how many letters follow, its mode, and the
/// socket's name in it.
const UNFINISHED: &str = ".freestone-";
const UNFINISHED_LETTERS: usize = 6;
const PRIVATE: u32 = 0o700;
const SOCKET: &str = "s";

/// Refuses a path that is too long for a socket.
pub fn check_length(path: &Path) -> Result<()> {
    if path.as_os_str().len() > MAX_PATH_BYTES {
        bail!("{}: too long for a socket; at most {MAX_PATH_BYTES} bytes", path.display());
    }
    Ok(())
}

/// The path of a socket of ours. Dropping it removes the path.
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    /// So that a successor's socket at the same path is left alone.
    identity: Identity,
}

/// Device, inode, and time of birth where the file system knows it: inode numbers are used again.
type Identity = (u64, u64, Option<SystemTime>);

fn identity(path: &Path) -> io::Result<Identity> {
    fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino(), meta.created().ok()))
}

impl SocketPath {
    /// Takes over the socket that is at `path` now.
    pub fn adopt(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.into(), identity: identity(path)? })
    }

    /// Removes the path, if it is still ours.
    pub fn remove(&self) {
        if identity(&self.path).is_ok_and(|found| found == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for SocketPath {
    fn drop(&mut self) {
        self.remove();
    }
}

/// A listening socket. Dropping it closes it and removes its path.
#[derive(Debug)]
pub struct PrivateSocket {
    listener: UnixListener,
    path: SocketPath,
}

impl PrivateSocket {
    /// Looks whether [`bind`](Self::bind) would work, and removes a socket that nobody serves any
    /// more: from here on what is at the path is a server that is ready.
    pub fn clear(path: &Path) -> Result<()> {
        let at = path.display();
        let _lock = lock_for(path)?;
        if refuse_taken(path)? {
            fs::remove_file(path).with_context(|| format!("{at}: cannot remove the old control socket"))?;
        }
        Ok(())
    }

    /// Listens at `path`, where those may connect to whom `access` gives it. A socket that nobody serves any more is replaced; one with a
    /// living server, and anything that is no socket, is refused.
    pub fn bind(path: &Path, access: &Access) -> Result<Self> {
        let at = path.display();
        // Two servers that start at one time must not both find the path free.
        let lock = lock_for(path)?;
        refuse_taken(path)?;
        remove_unfinished(parent(path)?, &lock);
        let listener = bind_private(parent(path)?, path, access)
            .with_context(|| format!("{at}: cannot create the control socket"))?;
        let path =
            SocketPath::adopt(path).with_context(|| format!("{at}: cannot look at the control socket"))?;
        Ok(Self { listener, path })
    }

    /// The socket.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Its path.
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

/// The lock of the directory of a socket.
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

/// Whether there is a socket that nobody serves any more.
fn refuse_taken(path: &Path) -> Result<bool> {
    let at = path.display();
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(e).with_context(|| format!("{at}: cannot create the control socket")),
        Ok(meta) if !meta.file_type().is_socket() => bail!("{at}: exists and is no socket; it is left alone"),
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => bail!("{at}: a server is running there; stop it, or name another path with --control"),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => Ok(true),
        Err(e) => Err(e).with_context(|| format!("{at}: cannot find out whether a server is running there")),
    }
}

/// Removes what a server left that was killed while it made its socket: none is being made, as whoever makes
/// one holds the lock. Only what is ours goes.
fn remove_unfinished(parent: &Path, _lock: &File) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let letters = name.as_encoded_bytes().strip_prefix(UNFINISHED.as_bytes());
        let is_unfinished = letters.is_some_and(|letters| letters.len() == UNFINISHED_LETTERS)
            && entry.metadata().is_ok_and(|meta| {
                let is_mine = meta.uid() == rustix::process::geteuid().as_raw();
                meta.is_dir() && is_mine && meta.mode() & 0o777 == PRIVATE
            });
        if is_unfinished {
            let socket = entry.path().join(SOCKET);
            if fs::symlink_metadata(&socket).is_ok_and(|meta| meta.file_type().is_socket()) {
                drop(fs::remove_file(socket));
            }
            // With anything else in it, it stays.
            drop(fs::remove_dir(entry.path()));
        }
    }
}

/// Binds in a fresh directory of mode 0700 and moves the finished socket to its place: at no time
/// can others connect than those to whom it is given.
fn bind_private(parent: &Path, path: &Path, access: &Access) -> io::Result<UnixListener> {
    let dir = tempfile::Builder::new()
        .prefix(UNFINISHED)
        .rand_bytes(UNFINISHED_LETTERS)
        .permissions(Permissions::from_mode(PRIVATE))
        .tempdir_in(parent)?;
    // By way of the descriptor, so that the longer name does not count against the limit of a
    // socket's path.
    let handle = File::open(dir.path())?;
    let short = PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", handle.as_fd().as_raw_fd()));
    let listener = UnixListener::bind(&short)?;
    fs::set_permissions(&short, Permissions::from_mode(0o600))?;
    let other = |error| io::Error::other(format!("it cannot be given {access}: {error}"));
    access.give(&short).map_err(other)?;
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
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let socket = PrivateSocket::bind(&path, &Access::default()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        // Nothing but the socket is left behind.
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);

        let error = PrivateSocket::bind(&path, &Access::default()).unwrap_err().to_string();
        assert!(
            error.ends_with("a server is running there; stop it, or name another path with --control"),
            "{error}"
        );
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn what_a_killed_server_left_unfinished_is_removed_and_nothing_else() {
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
    fn the_path_of_a_successor_is_left_alone() {
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
    fn what_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        fs::write(&path, "precious").unwrap();
        assert!(
            PrivateSocket::bind(&path, &Access::default()).unwrap_err().to_string().contains("is no socket")
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
