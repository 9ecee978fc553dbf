//! Listening sockets: made and removed.

use std::ffi::OsStr;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

pub use freestone_core::unix_socket::MAX_SOCKET_PATH_BYTES;
use freestone_core::unix_socket::{self, Access, BindError, SocketFile};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, getsockname, listen, socket_with, sockopt,
};
use thiserror::Error;

use crate::address::Address;

/// Connections that wait to be accepted; the kernel may allow fewer. Beyond it those that do not block
/// fail at a Unix socket, so there is room for many that come at once.
const BACKLOG: i32 = 4096;

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
    /// Mode, user or group of the socket cannot be set.
    #[error("{address}: the socket cannot be given {access}: {source}")]
    Access {
        /// The address.
        address: Address,
        /// What was to be set.
        access: Access,
        /// What the system says.
        source: io::Error,
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

impl ListenError {
    fn of(address: Address, error: BindError) -> Self {
        match error {
            BindError::InUse => Self::SocketInUse(address),
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
pub struct Bound {
    /// The address, with the port that the system chose.
    pub address: Address,
    /// One, or one for each address of a host; they do not block.
    pub sockets: Vec<OwnedFd>,
    /// The file of a Unix socket.
    pub file: Option<SocketFile>,
}

/// Listens at `address`; of a Unix socket `access` says who may connect.
pub fn bind_to(address: &Address, access: &Access) -> Result<Bound, ListenError> {
    match address {
        Address::Unix(path) => {
            let bound = unix_socket::bind_to(path, BACKLOG, access);
            let (socket, file) = bound.map_err(|error| ListenError::of(address.clone(), error))?;
            Ok(Bound { address: address.clone(), sockets: vec![socket], file: Some(file) })
        }
        Address::Tcp { host, port } => {
            let (sockets, port) = bind_tcp(address, host, *port)?;
            let address = Address::Tcp { host: host.clone(), port };
            Ok(Bound { address, sockets, file: None })
        }
        // Who is there is there already.
        Address::Stdin => Ok(Bound { address: Address::Stdin, sockets: Vec::new(), file: None }),
    }
}

/// A socket that listens already.
pub fn adopted(socket: OwnedFd) -> Result<Bound, ListenError> {
    let other = |source: io::Error| ListenError::Other { address: Address::Unix("socket".into()), source };
    let address = address_of(&socket).map_err(other)?;
    if !sockopt::socket_acceptconn(&socket).map_err(|error| other(error.into()))? {
        return Err(ListenError::Other {
            address,
            source: io::Error::other("the socket does not listen; a connection is served with --single"),
        });
    }
    let flags = rustix::fs::fcntl_getfl(&socket).map_err(|error| other(error.into()))?;
    rustix::fs::fcntl_setfl(&socket, flags | rustix::fs::OFlags::NONBLOCK)
        .map_err(|error| other(error.into()))?;
    Ok(Bound { address, sockets: vec![socket], file: None })
}

/// Where a socket is.
fn address_of(socket: &OwnedFd) -> io::Result<Address> {
    let is = getsockname(socket)?;
    if let Ok(at) = SocketAddr::try_from(is.clone()) {
        let (host, port) = (at.ip().to_string(), at.port());
        return Ok(Address::Tcp { host, port });
    }
    let unix = SocketAddrUnix::try_from(is).ok();
    let path = unix.as_ref().and_then(SocketAddrUnix::path_bytes);
    let path = path.ok_or_else(|| io::Error::other("a socket that is neither TCP's nor at a path"))?;
    Ok(Address::Unix(Path::new(OsStr::from_bytes(path)).to_path_buf()).absolute())
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
