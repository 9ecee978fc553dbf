//! The thread that accepts connections at every address of a server.
//!
//! Between accepts, its `next` callback closes connections whose time to live has passed.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use freestone_core::allow::peer_of;
use freestone_core::descriptor_reserve::Reserve;
use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SocketAddrAny, SocketFlags, acceptfrom_with, sockopt};

/// Identifier of the wakeup eventfd in the epoll set. Listener identifiers count up from 1.
const WAKE: u64 = 0;
/// Maximum number of events per `epoll_wait`.
const EVENTS: usize = 64;
/// Pause after an accept failed, for example because no file descriptors or memory were left.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Longest single wait, far below the limit of the system call. A longer wait is split.
const LONGEST_WAIT: Duration = Duration::from_secs(60 * 60);

/// Listening sockets and the epoll set that waits for connections.
#[derive(Debug)]
pub struct Acceptor {
    epoll: OwnedFd,
    wake: OwnedFd,
    /// Sockets by listener. The lock is held for system calls that do not block. It is a leaf lock.
    sockets: Mutex<HashMap<u64, Vec<OwnedFd>>>,
}

/// The next action of the accepting thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Stop,
    /// Accepts connections, and asks for the next action at this time at the latest.
    Accept(Option<Instant>),
    /// Accepts nothing, and asks for the next action when it is woken, or at this time at the latest.
    Wait(Instant),
}

/// The result of an accept: the socket and a description of the peer.
type AcceptResult = Result<(OwnedFd, String), Errno>;

impl Acceptor {
    /// Creates an acceptor without listeners.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn new() -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok(Self { epoll, wake, sockets: Mutex::default() })
    }

    /// Adds the sockets of a listener.
    ///
    /// # Errors
    /// The kernel has no room for more; the sockets are closed.
    pub fn add(&self, listener: u64, sockets: Vec<OwnedFd>) -> Result<(), Errno> {
        debug_assert!(listener != WAKE, "the identifier of the wakeup");
        // Under the lock, so that an event finds the sockets.
        let mut table = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        for socket in &sockets {
            // If a later socket fails, closing removes the entries added before.
            epoll::add(&self.epoll, socket, epoll::EventData::new_u64(listener), epoll::EventFlags::IN)?;
        }
        table.insert(listener, sockets);
        Ok(())
    }

    /// Closes the sockets of a listener. No socket listens there when this returns.
    pub fn remove(&self, listener: u64) {
        let removed = self.sockets.lock().unwrap_or_else(PoisonError::into_inner).remove(&listener);
        for socket in removed.iter().flatten() {
            // Closing is not enough if another process has a copy of the socket.
            let _ = epoll::delete(&self.epoll, socket);
        }
    }

    /// Makes the thread ask for its next action.
    pub fn wake(&self) {
        freestone_core::eventfd::wake(&self.wake);
    }

    /// Runs the thread: accepts connections until `next` returns [`Next::Stop`]. Calls `connected` with the
    /// listener, socket and peer of each connection, and `failed` for each failed accept.
    pub fn run(
        &self,
        mut next: impl FnMut() -> Next,
        mut connected: impl FnMut(u64, OwnedFd, String),
        mut failed: impl FnMut(u64, Errno),
    ) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENTS);
        let mut accepted: Vec<AcceptResult> = Vec::new();
        loop {
            let until = match next() {
                Next::Stop => return,
                Next::Accept(until) => until,
                Next::Wait(until) => {
                    let _ = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], Some(&left_until(until)));
                    // Fails with EAGAIN if the wait timed out.
                    let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
                    continue;
                }
            };
            let timeout = until.map(left_until);
            // A signal may end the wait early: `next` is asked again.
            let _ = epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref());
            for event in events.drain(..) {
                let listener = event.data.u64();
                if listener == WAKE {
                    // Fails with EAGAIN if another read reset the eventfd.
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
        // Under the lock for a system call or two, so that `remove` really closes the sockets.
        let table = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        // None: the listener was removed after the event.
        for socket in table.get(&listener).into_iter().flatten() {
            match acceptfrom_with(socket, SocketFlags::CLOEXEC) {
                Ok((stream, _)) if Reserve::OF_CLIENTS.includes(&stream) => accepted.push(Err(Errno::MFILE)),
                Ok((stream, peer)) => {
                    let peer = describe_peer(&stream, peer);
                    accepted.push(Ok((stream, peer)));
                }
                // No connection is pending, or the peer has already gone. Network errors concern the new
                // connection only, see accept(2).
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

/// Describes the peer of a connection for logs. For TCP, also disables the Nagle algorithm and enables
/// keepalive.
pub fn describe_peer(stream: &OwnedFd, peer: Option<SocketAddrAny>) -> String {
    if let Some(peer) = peer.and_then(|peer| SocketAddr::try_from(peer).ok()) {
        // Small requests and replies must not wait for each other. A failure only costs speed.
        let _ = sockopt::set_tcp_nodelay(stream, true);
        // Frees the connection of a peer whose machine is gone. A silent session has no other timeout.
        let _ = sockopt::set_socket_keepalive(stream, true);
        return peer.to_string();
    }
    peer_of(stream.as_fd()).map_or_else(|| "unknown".to_owned(), |peer| peer.to_string())
}
