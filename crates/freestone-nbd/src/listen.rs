//! Listening sockets: made, accepted from, removed.

use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, acceptfrom_with, bind, connect,
    getsockname, listen, socket_with, sockopt,
};
use thiserror::Error;

use crate::address::Address;

/// Connections that wait to be accepted; the kernel may allow fewer.
const BACKLOG: i32 = 128;
/// Longest path of a Unix socket in bytes (`sun_path` less its end).
pub const MAX_SOCKET_PATH_BYTES: usize = 107;
/// How long another process that makes a socket in the same directory is waited for.
const DIRECTORY_LOCK_WAIT: Duration = Duration::from_secs(1);

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

/// Sockets that listen at one address. The file of a Unix socket is removed on drop.
#[derive(Debug)]
pub struct Bound {
    /// The address, with the port that the system chose.
    pub address: Address,
    sockets: Vec<OwnedFd>,
    stop: OwnedFd,
    file: Option<SocketFile>,
}

#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

/// Listens at `address`.
pub fn bind_to(address: &Address) -> Result<Bound, ListenError> {
    let other = |errno: Errno| ListenError::Other { address: address.clone(), source: errno.into() };
    let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(other)?;
    match address {
        Address::Unix(path) => {
            let (socket, file) = bind_unix(address, path)?;
            Ok(Bound { address: address.clone(), sockets: vec![socket], stop, file: Some(file) })
        }
        Address::Tcp { host, port } => {
            let (sockets, port) = bind_tcp(address, host, *port)?;
            let address = Address::Tcp { host: host.clone(), port };
            Ok(Bound { address, sockets, stop, file: None })
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
    listen(&socket, BACKLOG).map_err(|errno| {
        file.remove();
        fail(errno)
    })?;
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
        // Also a full backlog (EAGAIN), or a socket of another type (EPROTOTYPE): somebody is there.
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

/// Held while a socket is made in the directory. Best effort: a directory that cannot be read is not locked.
fn lock_directory(directory: Option<&Path>) -> Option<File> {
    let directory = directory.filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = File::open(directory).ok()?;
    let deadline = Instant::now() + DIRECTORY_LOCK_WAIT;
    while let Err(Errno::WOULDBLOCK) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
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

impl Bound {
    /// Calls `connected` with each connection and its peer until [`stop`](Self::stop); `failed` when one could not be
    /// accepted.
    pub fn accept(&self, mut connected: impl FnMut(OwnedFd, String), mut failed: impl FnMut(Errno)) {
        /// How long to leave a machine without file descriptors alone.
        const PAUSE: rustix::event::Timespec = rustix::event::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        loop {
            let mut fds = vec![PollFd::new(&self.stop, PollFlags::IN)];
            fds.extend(self.sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN)));
            let _ = poll(&mut fds, None);
            if !fds[0].revents().is_empty() {
                return;
            }
            for socket in &self.sockets {
                match acceptfrom_with(socket, SocketFlags::CLOEXEC) {
                    Ok((stream, peer)) => {
                        let peer = self.describe_peer(&stream, peer);
                        connected(stream, peer);
                    }
                    // Nothing there, or the peer is gone again.
                    Err(Errno::WOULDBLOCK | Errno::INTR | Errno::CONNABORTED) => {}
                    Err(errno) => {
                        failed(errno);
                        let _ = poll(&mut [PollFd::new(&self.stop, PollFlags::IN)], Some(&PAUSE));
                    }
                }
            }
        }
    }

    /// Ends [`accept`](Self::accept), now or when it is called.
    pub fn stop(&self) {
        // It fails only where the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }

    fn describe_peer(&self, stream: &OwnedFd, peer: Option<SocketAddrAny>) -> String {
        if self.file.is_some() {
            return match sockopt::socket_peercred(stream) {
                Ok(credentials) => {
                    format!("pid {} of uid {}", credentials.pid.as_raw_nonzero(), credentials.uid.as_raw())
                }
                Err(_) => "unknown".to_owned(),
            };
        }
        // Small requests and replies must not wait for each other; the loss is speed only.
        let _ = sockopt::set_tcp_nodelay(stream, true);
        // A peer whose machine is gone must not keep its place for ever; nothing else ends a silent session.
        let _ = sockopt::set_socket_keepalive(stream, true);
        peer.and_then(|peer| SocketAddr::try_from(peer).ok())
            .map_or_else(|| "unknown".to_owned(), |peer| peer.to_string())
    }
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

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            file.remove();
        }
    }
}
