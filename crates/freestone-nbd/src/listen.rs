//! Listening sockets: made and removed.

use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, getsockname, listen, socket_with,
    sockopt,
};
use thiserror::Error;

use crate::address::Address;

/// Connections that wait to be accepted; the kernel may allow fewer.
const BACKLOG: i32 = 128;
/// Longest path of a Unix socket in bytes (`sun_path` less its end).
pub const MAX_SOCKET_PATH_BYTES: usize = 107;
/// How long another process that makes a socket in the same directory is waited for.
const DIRECTORY_LOCK_WAIT: Duration = Duration::from_secs(1);
/// The first and the longest pause between two attempts at that: it is held for some 30 µs.
const DIRECTORY_LOCK_PAUSES: Range<Duration> = Duration::from_micros(50)..Duration::from_millis(5);

/// Why a server cannot listen at an address.
#[derive(Debug, Error)]
pub enum ListenError {
    /// Somebody accepts connections at the path.
    #[error("{0}: another server listens there")]
    SocketInUse(Address),
    /// The path is taken by something that is no socket; it is left alone.
    #[error("{0}: the path is taken by something that is no socket")]
    NotASocket(Address),
    /// The port is taken.
    #[error("{0}: the port is in use")]
    PortInUse(Address),
    /// Not allowed: the directory, or a port below 1024.
    #[error("{0}: permission denied")]
    Permission(Address),
    /// The path does not fit into a socket address.
    #[error("{address}: the path has {len} bytes, a socket's path at most {MAX_SOCKET_PATH_BYTES}")]
    PathTooLong {
        /// The address.
        address: Address,
        /// Its length in bytes.
        len: usize,
    },
    /// The directory of the path is missing, or is no directory.
    #[error("{0}: there is no such directory")]
    NoDirectory(Address),
    /// The host has no address on this machine.
    #[error("{0}: the host is not an address of this machine")]
    NotOurs(Address),
    /// The name of the host is not known.
    #[error("{address}: the host is not known ({source})")]
    Host {
        /// The address.
        address: Address,
        /// What the resolver says.
        source: io::Error,
    },
    /// The server was shut down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// Anything else, for example no file descriptors.
    #[error("{address}: {source}")]
    Other {
        /// The address.
        address: Address,
        /// What the system says.
        source: io::Error,
    },
}

/// Sockets that listen at one address.
#[derive(Debug)]
pub struct Bound {
    /// The address, with the port that the system chose.
    pub address: Address,
    /// One, or one for each address of a host; they do not block.
    pub sockets: Vec<OwnedFd>,
    /// The file of a Unix socket.
    pub file: Option<SocketFile>,
}

/// The file of a Unix socket; removed on drop.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

/// Listens at `address`.
pub fn bind_to(address: &Address) -> Result<Bound, ListenError> {
    match address {
        Address::Unix(path) => {
            let (socket, file) = bind_unix(address, path)?;
            Ok(Bound { address: address.clone(), sockets: vec![socket], file: Some(file) })
        }
        Address::Tcp { host, port } => {
            let (sockets, port) = bind_tcp(address, host, *port)?;
            let address = Address::Tcp { host: host.clone(), port };
            Ok(Bound { address, sockets, file: None })
        }
    }
}

fn bind_unix(address: &Address, path: &Path) -> Result<(OwnedFd, SocketFile), ListenError> {
    let fail = |errno: Errno| match errno {
        Errno::ACCESS | Errno::PERM | Errno::ROFS => ListenError::Permission(address.clone()),
        Errno::NOENT | Errno::NOTDIR => ListenError::NoDirectory(address.clone()),
        Errno::ADDRINUSE => ListenError::SocketInUse(address.clone()),
        errno => ListenError::Other { address: address.clone(), source: errno.into() },
    };
    let len = path.as_os_str().len();
    if len > MAX_SOCKET_PATH_BYTES {
        return Err(ListenError::PathTooLong { address: address.clone(), len });
    }
    let name = SocketAddrUnix::new(path).map_err(fail)?;
    let new_socket = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // Linux gives the file the mode of the socket, so at no moment may others connect.
        fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        Ok(socket)
    };
    // Two servers that replace one stale socket must not remove each other's.
    let _lock = lock_directory(path.parent());
    let mut socket = new_socket().map_err(fail)?;
    if let Err(errno) = bind(&socket, &name) {
        if errno != Errno::ADDRINUSE {
            return Err(fail(errno));
        }
        remove_stale(address, path, &name)?;
        socket = new_socket().map_err(fail)?;
        bind(&socket, &name).map_err(fail)?;
    }
    let metadata = fs::symlink_metadata(path)
        .map_err(|source| ListenError::Other { address: address.clone(), source })?;
    let file = SocketFile { path: path.to_path_buf(), identity: (metadata.dev(), metadata.ino()) };
    listen(&socket, BACKLOG).map_err(fail)?;
    Ok((socket, file))
}

/// Removes a socket at which nobody accepts.
fn remove_stale(address: &Address, path: &Path, name: &SocketAddrUnix) -> Result<(), ListenError> {
    let other = |source: io::Error| ListenError::Other { address: address.clone(), source };
    match fs::symlink_metadata(path) {
        // Removed by its server meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(other(error)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(ListenError::NotASocket(address.clone()));
        }
        Ok(_) => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|errno| other(errno.into()))?;
    match connect(&probe, name) {
        Err(Errno::CONNREFUSED) => {}
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ACCESS | Errno::PERM) => return Err(ListenError::Permission(address.clone())),
        // Also a full backlog (EAGAIN), or a socket of another type (EPROTOTYPE): somebody is
        // there.
        Ok(()) | Err(_) => return Err(ListenError::SocketInUse(address.clone())),
    }
    tracing::info!(%address, "replacing a socket at which nobody listens");
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err(ListenError::Permission(address.clone()))
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(other(error)),
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

/// Listens at every address of the host, at one port.
fn bind_tcp(address: &Address, host: &str, port: u16) -> Result<(Vec<OwnedFd>, u16), ListenError> {
    let mut resolved: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|source| ListenError::Host { address: address.clone(), source })?
        .collect();
    resolved.sort();
    resolved.dedup();
    let only_v6 = resolved.iter().any(SocketAddr::is_ipv4);
    let mut sockets = Vec::new();
    let mut port = port;
    let mut unavailable = Errno::ADDRNOTAVAIL;
    for mut at in resolved {
        at.set_port(port);
        match bind_one(&at, only_v6) {
            Ok((socket, bound)) => {
                sockets.push(socket);
                port = bound;
            }
            // For example a name with an IPv6 address, on a machine without IPv6.
            Err(errno @ (Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT)) => unavailable = errno,
            Err(Errno::ADDRINUSE) => return Err(ListenError::PortInUse(address.clone())),
            Err(Errno::ACCESS | Errno::PERM) => return Err(ListenError::Permission(address.clone())),
            Err(errno) => {
                return Err(ListenError::Other { address: address.clone(), source: errno.into() });
            }
        }
    }
    if sockets.is_empty() {
        tracing::debug!(%address, %unavailable, "no address of the host can be used");
        return Err(ListenError::NotOurs(address.clone()));
    }
    Ok((sockets, port))
}

fn bind_one(at: &SocketAddr, only_v6: bool) -> Result<(OwnedFd, u16), Errno> {
    let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    // On Linux this ignores connections that linger of an earlier server, never a listening one.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if at.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, only_v6)?;
    }
    bind(&socket, at)?;
    listen(&socket, BACKLOG)?;
    let bound = SocketAddr::try_from(getsockname(&socket)?).map_err(|_| Errno::AFNOSUPPORT)?;
    Ok((socket, bound.port()))
}

impl SocketFile {
    /// Removes the file, unless the path is another's by now.
    fn remove(&self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.identity);
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the socket could not be removed");
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.remove();
    }
}
