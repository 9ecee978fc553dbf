//! Creates and removes listening sockets.

use std::ffi::OsStr;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

pub use freestone_core::unix_socket::MAX_SOCKET_PATH_BYTES;
use freestone_core::unix_socket::{self, Access, BindError, Listener, SocketFile};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, getsockname, listen, socket_with, sockopt,
};
use thiserror::Error;

use crate::address::Address;

/// Maximum number of connections queued for accept at one socket; the kernel may use less. A nonblocking
/// connect to a Unix socket fails if the queue is full, so the queue must hold bursts.
const BACKLOG: i32 = 4096;

/// Why a server cannot listen at an address.
#[derive(Debug, Error)]
pub enum ListenError {
    /// Another server accepts connections at the path.
    #[error("{0}: {1}")]
    SocketInUse(Address, Listener),
    /// The path exists and is not a socket; it is left unchanged.
    #[error("{0}: the path exists and is not a socket")]
    NotASocket(Address),
    /// The port is in use.
    #[error("{0}: the port is in use")]
    PortInUse(Address),
    /// Permission denied for the directory, or for a port below 1024.
    #[error("{0}: permission denied")]
    Permission(Address),
    /// The path is too long for a socket address.
    #[error("{address}: the path has {len} bytes, a socket's path at most {MAX_SOCKET_PATH_BYTES}")]
    PathTooLong {
        /// The address.
        address: Address,
        /// Length of the path in bytes.
        len: usize,
    },
    /// The mode, user or group of the socket cannot be set.
    #[error("{address}: the socket cannot be given {access}: {source}")]
    Access {
        /// The address.
        address: Address,
        /// The requested mode, user and group.
        access: Access,
        /// The system's reason.
        source: io::Error,
    },
    /// The directory of the path is missing, or is not a directory.
    #[error("{0}: the directory does not exist")]
    NoDirectory(Address),
    /// No address of the host belongs to this machine.
    #[error("{0}: the host is not an address of this machine")]
    NotLocal(Address),
    /// The host name cannot be resolved.
    #[error("{address}: the host is not known ({source})")]
    Host {
        /// The address.
        address: Address,
        /// The resolver's reason.
        source: io::Error,
    },
    /// The server was shut down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// Any other error, for example no file descriptors left.
    #[error("{address}: {source}")]
    Other {
        /// The address.
        address: Address,
        /// The system's reason.
        source: io::Error,
    },
}

impl ListenError {
    fn of(address: Address, error: BindError) -> Self {
        match error {
            BindError::InUse(listener) => Self::SocketInUse(address, listener),
            BindError::NotASocket => Self::NotASocket(address),
            BindError::Permission => Self::Permission(address),
            BindError::Access { access, source } => Self::Access { address, access, source },
            BindError::PathTooLong(len) => Self::PathTooLong { address, len },
            BindError::NoDirectory => Self::NoDirectory(address),
            BindError::Other(source) => Self::Other { address, source },
        }
    }
}

/// Sockets that listen at one address.
#[derive(Debug)]
pub struct BoundSockets {
    /// The address. Port 0 is replaced by the port that the system chose.
    pub address: Address,
    /// One nonblocking socket, or one for each address of a host.
    pub sockets: Vec<OwnedFd>,
    /// The file of a Unix socket that this server created, which is removed on drop.
    pub file: Option<SocketFile>,
}

/// Listens at `address`. `access` is the mode, user and group of a Unix socket.
pub fn bind_to(address: &Address, access: &Access) -> Result<BoundSockets, ListenError> {
    match address {
        Address::Unix(path) => {
            let bound = unix_socket::bind_to(path, BACKLOG, access);
            let (socket, file) = bound.map_err(|error| ListenError::of(address.clone(), error))?;
            Ok(BoundSockets { address: address.clone(), sockets: vec![socket], file: Some(file) })
        }
        Address::Tcp { host, port } => {
            let (sockets, port) = bind_tcp(address, host, *port)?;
            let address = Address::Tcp { host: host.clone(), port };
            Ok(BoundSockets { address, sockets, file: None })
        }
        // The single client is already connected.
        Address::Stdin => Ok(BoundSockets { address: Address::Stdin, sockets: Vec::new(), file: None }),
    }
}

/// Takes over a listening socket that another process created, and makes it nonblocking.
pub fn adopt_socket(socket: OwnedFd) -> Result<BoundSockets, ListenError> {
    let other = |source: io::Error| ListenError::Other { address: Address::Unix("socket".into()), source };
    let address = address_of(&socket).map_err(other)?;
    if !sockopt::socket_acceptconn(&socket).map_err(|error| other(error.into()))? {
        return Err(ListenError::Other {
            address,
            source: io::Error::other("the socket does not listen; a connection is served with --single"),
        });
    }
    prepare(&socket).map_err(other)?;
    Ok(BoundSockets { address, sockets: vec![socket], file: None })
}

/// Takes over the listening sockets of a predecessor at `address`, and the file of a Unix socket. Returns None
/// and closes the sockets if the file does not exist, as clients cannot connect to them.
///
/// # Errors
/// Also returns the sockets, to which the file still belongs.
pub fn inherit(
    address: &Address,
    sockets: Vec<OwnedFd>,
    access: &Access,
) -> Result<Option<BoundSockets>, (ListenError, Vec<OwnedFd>)> {
    if let Err(source) = sockets.iter().try_for_each(check_listening) {
        return Err((ListenError::Other { address: address.clone(), source }, sockets));
    }
    let Address::Unix(path) = address else {
        return Ok(Some(BoundSockets { address: address.clone(), sockets, file: None }));
    };
    match access.reapply(path).and_then(|()| SocketFile::adopt(path)) {
        Ok(file) => Ok(Some(BoundSockets { address: address.clone(), sockets, file: Some(file) })),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => {
            let error = ListenError::Access { address: address.clone(), access: *access, source };
            Err((error, sockets))
        }
    }
}

/// Checks that a socket of a predecessor listens, and prepares it for this process.
fn check_listening(socket: &OwnedFd) -> io::Result<()> {
    if !sockopt::socket_acceptconn(socket)? {
        return Err(io::Error::other("the socket of the predecessor does not listen"));
    }
    prepare(socket)
}

/// Makes a listening socket nonblocking, and closes it on exec.
fn prepare(socket: &OwnedFd) -> io::Result<()> {
    rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::CLOEXEC)?;
    let flags = rustix::fs::fcntl_getfl(socket)?;
    rustix::fs::fcntl_setfl(socket, flags | rustix::fs::OFlags::NONBLOCK)?;
    Ok(())
}

/// Closes the listening sockets of a predecessor, and removes the file of a Unix socket.
pub fn discard(address: &Address, sockets: Vec<OwnedFd>) {
    if let Address::Unix(path) = address {
        // Fails if the file was removed or replaced.
        drop(SocketFile::adopt(path));
    }
    drop(sockets);
}

/// Returns the local address of a TCP socket, or of a Unix socket with a path.
fn address_of(socket: &OwnedFd) -> io::Result<Address> {
    let is = getsockname(socket)?;
    if let Ok(at) = SocketAddr::try_from(is.clone()) {
        let (host, port) = (at.ip().to_string(), at.port());
        return Ok(Address::Tcp { host, port });
    }
    let unix = SocketAddrUnix::try_from(is).ok();
    let path = unix.as_ref().and_then(SocketAddrUnix::path_bytes);
    let path = path.ok_or_else(|| io::Error::other("neither a TCP socket nor a Unix socket with a path"))?;
    Ok(Address::Unix(Path::new(OsStr::from_bytes(path)).to_path_buf()).absolute())
}

/// Listens at every address of the host, with the same port. Returns the sockets and the port.
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
            // Skipped: for example, the name has an IPv6 address, but this machine has no IPv6.
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
        return Err(ListenError::NotLocal(address.clone()));
    }
    Ok((sockets, port))
}

fn bind_one(at: &SocketAddr, only_v6: bool) -> Result<(OwnedFd, u16), Errno> {
    let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    // On Linux this ignores connections in TIME_WAIT, but never another listening socket.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if at.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, only_v6)?;
    }
    bind(&socket, at)?;
    listen(&socket, BACKLOG)?;
    let bound = SocketAddr::try_from(getsockname(&socket)?).map_err(|_| Errno::AFNOSUPPORT)?;
    Ok((socket, bound.port()))
}
