//! The one thread that accepts at every address of a server, however many there are; it also keeps
//! the time of those connections that may only stay for so long.

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

/// Identifier of the wake in the epoll set; listeners count up from 1.
const WAKE: u64 = 0;
/// Events that are taken at once.
const EVENTS: usize = 64;
/// How long to leave a machine without file descriptors or memory alone.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Longest wait, far below what the system call takes; a longer one is made of several.
const LONGEST_WAIT: Duration = Duration::from_secs(60 * 60);

/// Listening sockets, and what they are waited on with.
#[derive(Debug)]
pub struct Acceptor {
    epoll: OwnedFd,
    wake: OwnedFd,
    /// By listener. Held for calls that do not block; no other lock is taken under it.
    sockets: Mutex<HashMap<u64, Vec<OwnedFd>>>,
}

/// What the thread does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// It ends.
    Stop,
    /// It accepts, and asks again at that moment at the latest.
    Accept(Option<Instant>),
    /// It accepts nothing, and asks again when it is woken, at that moment at the latest.
    Wait(Instant),
}

/// What became of a connection that was to be accepted: its socket and who is at the other end.
type Accepted = Result<(OwnedFd, String), Errno>;

impl Acceptor {
    /// Without listeners.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn new() -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok(Self { epoll, wake, sockets: Mutex::default() })
    }

    /// Accepts from these sockets, too.
    ///
    /// # Errors
    /// The system has no room for more; the sockets are closed.
    pub fn add(&self, listener: u64, sockets: Vec<OwnedFd>) -> Result<(), Errno> {
        debug_assert!(listener != WAKE, "the wake's identifier");
        // Under the lock: an event finds its sockets.
        let mut table = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        for socket in &sockets {
            // Of one that was added before a failure, the entry goes when it is closed.
            epoll::add(&self.epoll, socket, epoll::EventData::new_u64(listener), epoll::EventFlags::IN)?;
        }
        table.insert(listener, sockets);
        Ok(())
    }

    /// Closes the sockets of a listener: when this returns, nothing listens there.
    pub fn remove(&self, listener: u64) {
        let removed = self.sockets.lock().unwrap_or_else(PoisonError::into_inner).remove(&listener);
        for socket in removed.iter().flatten() {
            // Closing alone would do, unless another process was given the socket.
            let _ = epoll::delete(&self.epoll, socket);
        }
    }

    /// Makes the thread ask what comes next.
    pub fn wake(&self) {
        freestone_core::eventfd::wake(&self.wake);
    }

    /// The thread: accepts until `next` says to stop. `connected` gets the listener with each
    /// connection and its peer; `failed` is told where one could not be accepted.
    pub fn run(
        &self,
        mut next: impl FnMut() -> Next,
        mut connected: impl FnMut(u64, OwnedFd, String),
        mut failed: impl FnMut(u64, Errno),
    ) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENTS);
        let mut accepted: Vec<Accepted> = Vec::new();
        loop {
            let until = match next() {
                Next::Stop => return,
                Next::Accept(until) => until,
                Next::Wait(until) => {
                    let _ = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], Some(&left_until(until)));
                    // Unreadable where the time is up.
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
                    // It fails with EAGAIN where it is unreadable already.
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

    /// Accepts one connection at each socket of a listener that has one.
    fn accept(&self, listener: u64, accepted: &mut Vec<Accepted>) {
        // Under the lock, so that whoever removes the listener closes its sockets: a system call or
        // two.
        let table = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        // None: it was removed after its event.
        for socket in table.get(&listener).into_iter().flatten() {
            match acceptfrom_with(socket, SocketFlags::CLOEXEC) {
                Ok((stream, _)) if Reserve::OF_CLIENTS.includes(&stream) => accepted.push(Err(Errno::MFILE)),
                Ok((stream, peer)) => {
                    let peer = describe_peer(&stream, peer);
                    accepted.push(Ok((stream, peer)));
                }
                // Nothing there, or the peer is gone again; errors of the network are the
                // connection's, accept(2).
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

/// Who is at the other end; of a TCP connection also sets what makes it quick and lets it end.
pub fn describe_peer(stream: &OwnedFd, peer: Option<SocketAddrAny>) -> String {
    if let Some(peer) = peer.and_then(|peer| SocketAddr::try_from(peer).ok()) {
        // Small requests and replies must not wait for each other; the loss is speed only.
        let _ = sockopt::set_tcp_nodelay(stream, true);
        // A peer whose machine is gone must not keep its place for ever; nothing else ends a silent
        // session.
        let _ = sockopt::set_socket_keepalive(stream, true);
        return peer.to_string();
    }
    peer_of(stream.as_fd()).map_or_else(|| "unknown".to_owned(), |peer| peer.to_string())
}
