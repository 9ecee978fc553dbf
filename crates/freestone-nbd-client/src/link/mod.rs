//! A non-blocking stream to a server, with or without TLS.
//!
//! [`handshake`] negotiates over a [`Link`] and returns the properties of the export ([`export_info`]). One
//! connection owns each link. This module does not depend on requests or on the shared state.

pub mod export_info;
pub mod handshake;
mod socket;
pub mod tls;
pub mod wake;

use std::io::{self, IoSlice};
use std::net::ToSocketAddrs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt,
};

use self::socket::{receive, send};
use self::tls::{TlsSettings, TlsStream};
use self::wake::Deadline;
use crate::error::LinkError;
use crate::uri::ServerAddress;

/// Idle time after which the kernel probes the server.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 4;

pub struct Link {
    socket: OwnedFd,
    tls: Option<Box<TlsStream>>,
}

impl Link {
    /// Connects to a server. The name lookup blocks for as long as the system resolver takes.
    pub fn connect(address: &ServerAddress, deadline: Deadline<'_>) -> Result<Self, LinkError> {
        match address {
            ServerAddress::Unix(path) => {
                let address = SocketAddrUnix::new(path).map_err(|errno| LinkError::Connect(errno.into()))?;
                Self::to(AddressFamily::UNIX, &address.into(), deadline)
            }
            ServerAddress::Tcp { host, port } => {
                let found = (host.as_str(), *port).to_socket_addrs().map_err(LinkError::Host)?;
                let mut last = LinkError::Host(io::Error::other("it has no address"));
                for address in found {
                    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                    match Self::to(family, &SocketAddrAny::from(address), deadline) {
                        Ok(link) => return Ok(link.for_tcp()?),
                        Err(end @ (LinkError::Stopped | LinkError::Timeout(_))) => return Err(end),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }

    fn to(family: AddressFamily, address: &SocketAddrAny, deadline: Deadline<'_>) -> Result<Self, LinkError> {
        let refused = |errno: Errno| LinkError::Connect(errno.into());
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::STREAM, flags, None).map_err(refused)?;
        loop {
            match connect(&socket, address) {
                Ok(()) | Err(Errno::ISCONN) => break,
                Err(Errno::INTR) => {}
                Err(Errno::INPROGRESS | Errno::ALREADY) => {
                    deadline.wait(socket.as_fd(), PollFlags::OUT)?;
                    sockopt::socket_error(&socket).map_err(refused)?.map_err(refused)?;
                }
                // The queue of a Unix socket is full. The kernel gives no notification, so this
                // polls.
                Err(Errno::AGAIN) => deadline.pause()?,
                Err(errno) => return Err(refused(errno)),
            }
        }
        Ok(Self { socket, tls: None })
    }

    /// Sets `TCP_NODELAY`, and keepalive to detect a dead server.
    fn for_tcp(self) -> io::Result<Self> {
        sockopt::set_tcp_nodelay(&self.socket, true)?;
        sockopt::set_socket_keepalive(&self.socket, true)?;
        sockopt::set_tcp_keepidle(&self.socket, KEEPALIVE_IDLE)?;
        sockopt::set_tcp_keepintvl(&self.socket, KEEPALIVE_INTERVAL)?;
        sockopt::set_tcp_keepcnt(&self.socket, KEEPALIVE_PROBES)?;
        Ok(self)
    }

    /// Performs the TLS handshake. All later data is encrypted.
    pub fn start_tls(&mut self, settings: &TlsSettings, deadline: Deadline<'_>) -> Result<(), LinkError> {
        let mut tls = Box::new(TlsStream::begin(settings)?);
        tls.handshake(self.socket.as_fd(), deadline)?;
        self.tls = Some(tls);
        Ok(())
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Receives up to `buf.len()` bytes. Returns 0 if the server has closed the connection, and
    /// `None` if no data is available.
    pub fn recv(&mut self, buf: &mut [u8]) -> io::Result<Option<usize>> {
        match &mut self.tls {
            Some(tls) => tls.recv(self.socket.as_fd(), buf),
            None => receive(self.socket.as_fd(), buf),
        }
    }

    /// Sends as much as possible without blocking. Returns the number of bytes accepted, which may
    /// be 0.
    pub fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => tls.send(self.socket.as_fd(), parts),
            None => send(self.socket.as_fd(), parts),
        }
    }

    /// Returns true if TLS still buffers data that [`send`](Self::send) has accepted.
    pub fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_unsent())
    }

    /// Returns true if received data may be buffered although the socket is not readable.
    pub fn has_unread(&self) -> bool {
        self.tls.is_some()
    }
}
