//! A connection to a server: a socket that never blocks, with TLS over it or without.

use std::io::{self, IoSlice};
use std::net::ToSocketAddrs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt,
};

use crate::error::LinkError;
use crate::socket::{receive, send};
use crate::tls::{TlsSettings, TlsStream};
use crate::uri::Place;
use crate::wake::Patience;

/// After so long without a word the kernel asks whether the server is still there.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 4;

/// A connection.
pub struct Link {
    socket: OwnedFd,
    tls: Option<Box<TlsStream>>,
}

impl Link {
    /// Connects. The name of a host is looked up, which takes as long as the system has it take.
    ///
    /// # Errors
    /// See [`LinkError`].
    pub fn connect(place: &Place, patience: Patience<'_>) -> Result<Self, LinkError> {
        match place {
            Place::Unix(path) => {
                let at = SocketAddrUnix::new(path).map_err(|errno| LinkError::Connect(errno.into()))?;
                Self::to(AddressFamily::UNIX, &at.into(), patience)
            }
            Place::Tcp { host, port } => {
                let found = (host.as_str(), *port).to_socket_addrs().map_err(LinkError::Host)?;
                let mut last = LinkError::Host(io::Error::other("it has no address"));
                for at in found {
                    let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                    match Self::to(family, &SocketAddrAny::from(at), patience) {
                        Ok(link) => return Ok(link.for_tcp()?),
                        Err(end @ (LinkError::Ending | LinkError::Silent(_))) => return Err(end),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }

    fn to(family: AddressFamily, at: &SocketAddrAny, patience: Patience<'_>) -> Result<Self, LinkError> {
        let refused = |errno: Errno| LinkError::Connect(errno.into());
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::STREAM, flags, None).map_err(refused)?;
        loop {
            match connect(&socket, at) {
                Ok(()) | Err(Errno::ISCONN) => break,
                Err(Errno::INTR) => {}
                Err(Errno::INPROGRESS | Errno::ALREADY) => {
                    patience.wait(socket.as_fd(), PollFlags::OUT)?;
                    sockopt::socket_error(&socket).map_err(refused)?.map_err(refused)?;
                }
                // The queue of a Unix socket is full, and nothing tells when that ends.
                Err(Errno::AGAIN) => patience.pause()?,
                Err(errno) => return Err(refused(errno)),
            }
        }
        Ok(Self { socket, tls: None })
    }

    /// Requests are not held back to fill packets, and a server that is gone is found out.
    fn for_tcp(self) -> io::Result<Self> {
        sockopt::set_tcp_nodelay(&self.socket, true)?;
        sockopt::set_socket_keepalive(&self.socket, true)?;
        sockopt::set_tcp_keepidle(&self.socket, KEEPALIVE_IDLE)?;
        sockopt::set_tcp_keepintvl(&self.socket, KEEPALIVE_INTERVAL)?;
        sockopt::set_tcp_keepcnt(&self.socket, KEEPALIVE_PROBES)?;
        Ok(self)
    }

    /// Goes on with TLS. What came before is not looked at again.
    ///
    /// # Errors
    /// See [`LinkError`].
    pub fn start_tls(&mut self, settings: &TlsSettings, patience: Patience<'_>) -> Result<(), LinkError> {
        let mut tls = Box::new(TlsStream::begin(settings)?);
        tls.shake_hands(self.socket.as_fd(), patience)?;
        self.tls = Some(tls);
        Ok(())
    }

    /// The socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// What is there, up to the length of `buf`; 0 where the server has closed. `None`: nothing is.
    ///
    /// # Errors
    /// The connection is lost.
    pub fn recv(&mut self, buf: &mut [u8]) -> io::Result<Option<usize>> {
        match &mut self.tls {
            Some(tls) => tls.recv(self.socket.as_fd(), buf),
            None => receive(self.socket.as_fd(), buf),
        }
    }

    /// Sends as much as goes, 0 where that is nothing now.
    ///
    /// # Errors
    /// The connection is lost.
    pub fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => tls.send(self.socket.as_fd(), parts),
            None => send(self.socket.as_fd(), parts),
        }
    }

    /// Whether something that was taken has still to leave.
    pub fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_unsent())
    }

    /// Whether something that arrived may be there although the socket is not readable.
    pub fn has_unread(&self) -> bool {
        self.tls.is_some()
    }
}
