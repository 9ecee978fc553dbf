//! The thread that accepts connections at every address of a server.
//!
//! Between accepts, the `next` callback of [`Acceptor::run`] closes connections whose time to live has
//! passed.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use freestone_core::allow::socket_peer;
use freestone_core::descriptor_reserve::DescriptorReserve;
use freestone_core::sync::Mutex;
use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SocketAddrAny, SocketFlags, acceptfrom_with, sockopt};

/// Identifier of the wakeup eventfd in the epoll set. Identifiers of listeners start at 1.
const WAKE: u64 = 0;
/// Maximum number of events per `epoll_wait`.
const EVENTS: usize = 64;
/// Pause after a failed accept, for example because no file descriptors or memory were left.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Longest single wait, below the limit of `epoll_wait`. A longer wait is split.
const LONGEST_WAIT: Duration = Duration::from_secs(60 * 60);

/// Listening sockets and the epoll set that waits for connections.
#[derive(Debug)]
pub struct Acceptor {
    epoll: OwnedFd,
    wake: OwnedFd,
    /// Listening sockets by listener identifier. Leaf lock, held only across system calls that do not block.
    sockets: Mutex<HashMap<u64, Vec<OwnedFd>>>,
}

/// The next action of the accepting thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcceptorAction {
    Stop,
    /// Accept connections, and ask for the next action at this time at the latest. `None`: no time limit.
    Accept(Option<Instant>),
    /// Accept nothing, and ask for the next action when woken, or at this time at the latest.
    Wait(Instant),
}

/// The result of an accept: the socket and a description of the peer.
type AcceptResult = Result<(OwnedFd, String), Errno>;

impl Acceptor {
    /// Creates an acceptor without listeners.
    ///
    /// # Errors
    /// The epoll set or the eventfd cannot be created, for example because no file descriptors are left.
    pub fn new() -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok(Self { epoll, wake, sockets: Mutex::default() })
    }

    /// Adds the listening sockets of a listener, so that [`run`](Self::run) accepts connections at them.
    ///
    /// # Errors
    /// A socket cannot be added to the epoll set. All sockets of the listener are closed.
    pub fn add(&self, listener: u64, sockets: Vec<OwnedFd>) -> Result<(), Errno> {
        debug_assert!(listener != WAKE, "the identifier of the wakeup");
        // The lock is held until the table has the sockets, so that an early event finds them.
        let mut table = self.sockets.lock();
        for socket in &sockets {
            // On failure `sockets` is dropped: closing a socket also removes its entry from the epoll set.
            epoll::add(&self.epoll, socket, epoll::EventData::new_u64(listener), epoll::EventFlags::IN)?;
        }
        table.insert(listener, sockets);
        Ok(())
    }

    /// Removes a listener and returns its sockets. No further connection is accepted there when this returns.
    pub fn remove(&self, listener: u64) -> Vec<OwnedFd> {
        let removed = self.sockets.lock().remove(&listener).unwrap_or_default();
        for socket in &removed {
            // Closing alone would keep the epoll entry if another process has a copy of the socket.
            let _ = epoll::delete(&self.epoll, socket);
        }
        removed
    }

    /// Wakes the accepting thread, which then calls `next`.
    pub fn wake(&self) {
        freestone_core::eventfd::wake(&self.wake);
    }

    /// Runs the accepting thread until `next` returns [`AcceptorAction::Stop`]. Calls `connected` with the
    /// listener, socket and peer of each connection, and `failed` for each failed accept.
    pub fn run(
        &self,
        mut next: impl FnMut() -> AcceptorAction,
        mut connected: impl FnMut(u64, OwnedFd, String),
        mut failed: impl FnMut(u64, Errno),
    ) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENTS);
        let mut accepted: Vec<AcceptResult> = Vec::new();
        loop {
            let until = match next() {
                AcceptorAction::Stop => return,
                AcceptorAction::Accept(until) => until,
                AcceptorAction::Wait(until) => {
                    let _ = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], Some(&left_until(until)));
                    // Resets the eventfd. Fails with EAGAIN if the wait timed out.
                    let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
                    continue;
                }
            };
            let timeout = until.map(left_until);
            // A signal may end the wait early; `next` is then called again.
            let _ = epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref());
            for event in events.drain(..) {
                let listener = event.data.u64();
                if listener == WAKE {
                    // Resets the eventfd. Fails with EAGAIN if another read has already reset it.
                    let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
                    continue;
                }
                self.accept(listener, &mut accepted);
                for outcome in accepted.drain(..) {
                    match outcome {
                        Ok((socket, peer)) => connected(listener, socket, peer),
                        Err(errno) => {
                            failed(listener, errno);
                            let _ = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], Some(&PAUSE));
                        }
                    }
                }
            }
        }
    }

    /// Accepts one connection at each socket of a listener that has a pending one.
    fn accept(&self, listener: u64, accepted: &mut Vec<AcceptResult>) {
        // The lock is held across the accepts, so that `remove` does not return while a socket is in use.
        let table = self.sockets.lock();
        // The entry is missing if the listener was removed after the event.
        for socket in table.get(&listener).into_iter().flatten() {
            match acceptfrom_with(socket, SocketFlags::CLOEXEC) {
                Ok((stream, _)) if DescriptorReserve::CLIENTS.includes(&stream) => {
                    accepted.push(Err(Errno::MFILE));
                }
                Ok((stream, peer)) => {
                    let peer = describe_peer(&stream, peer);
                    accepted.push(Ok((stream, peer)));
                }
                // No connection is pending, or the peer has already gone. Network errors concern only the new
                // connection, see accept(2).
                Err(
                    Errno::WOULDBLOCK
                    | Errno::INTR
                    | Errno::CONNABORTED
                    | Errno::NETDOWN
                    | Errno::PROTO
                    | Errno::NOPROTOOPT
                    | Errno::HOSTDOWN
                    | Errno::NONET
                    | Errno::HOSTUNREACH
                    | Errno::OPNOTSUPP
                    | Errno::NETUNREACH,
                ) => {}
                Err(errno) => accepted.push(Err(errno)),
            }
        }
    }
}

fn left_until(until: Instant) -> Timespec {
    let left = until.saturating_duration_since(Instant::now()).min(LONGEST_WAIT);
    Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
}

/// Returns a description of the peer of a connection, for logs. For TCP, also disables the Nagle algorithm
/// and enables keepalive.
pub fn describe_peer(stream: &OwnedFd, peer: Option<SocketAddrAny>) -> String {
    if let Some(peer) = peer.and_then(|peer| SocketAddr::try_from(peer).ok()) {
        // The Nagle algorithm would delay small requests and replies. A failure only costs speed.
        let _ = sockopt::set_tcp_nodelay(stream, true);
        // Ends the connection of a peer whose machine is gone. An idle session has no other timeout.
        let _ = sockopt::set_socket_keepalive(stream, true);
        return peer.to_string();
    }
    socket_peer(stream.as_fd()).map_or_else(|| "unknown".to_owned(), |peer| peer.to_string())
}
