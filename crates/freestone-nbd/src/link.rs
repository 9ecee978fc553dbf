//! The state that the server and the thread of a connection share.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use freestone_core::allow::socket_peer;
use freestone_core::completion_queue::CompletionQueue;
use freestone_core::device::{self, IoBuf, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};

use crate::address::Address;
use crate::stats::Counters;

/// The completion of a submitted part of a request.
#[derive(Debug)]
pub struct CompletedPart {
    /// Index of the part's operation in the session's operations.
    pub slot: usize,
    pub request: Request,
    /// Length of the part's data in bytes.
    pub len: usize,
    /// Bytes charged for the part: its data and the extra space for unaligned blocks.
    pub charge: usize,
    pub outcome: device::Result<()>,
    pub buffer: IoBuf,
}

/// The connection serves its client.
const SERVING: u8 = 0;
/// The connection stops at the next boundary of a request, to be passed to a successor.
const PASSING: u8 = 1;
/// The connection replies to the requests it has received, and ends.
const DRAINING: u8 = 2;
/// The connection ends at once.
const CUT: u8 = 3;
/// The socket belongs to a successor.
const PASSED: u8 = 4;

/// A connection: its socket, its completion queue, and its state for the server.
#[derive(Debug)]
pub struct Link {
    /// Identifier of the connection, unique in its server.
    pub id: u64,
    /// The address at which the connection was accepted.
    pub address: Address,
    peer: String,
    socket: OwnedFd,
    queue: Arc<CompletionQueue<CompletedPart>>,
    /// [`SERVING`], [`PASSING`], [`DRAINING`], [`CUT`] or [`PASSED`]. Grows only; [`CUT`] and [`PASSED`] are final.
    phase: AtomicU8,
    /// The names in the client's certificate, set when TLS has started.
    certificate_names: OnceLock<Vec<String>>,
    counters: Counters,
}

impl Link {
    /// Creates the link of an accepted socket.
    ///
    /// # Errors
    /// No file descriptor is left for the completion queue.
    pub fn new(id: u64, address: Address, peer: String, socket: OwnedFd) -> std::io::Result<Self> {
        let queue = Arc::new(CompletionQueue::new()?);
        let phase = AtomicU8::new(SERVING);
        let (client, counters) = (OnceLock::new(), Counters::default());
        Ok(Self { id, address, peer, socket, queue, phase, certificate_names: client, counters })
    }

    /// Returns the description of the peer, for logs.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Returns the pid of the process at the other end of a Unix socket, or None if it is unknown.
    pub fn process(&self) -> Option<i32> {
        socket_peer(self.socket.as_fd()).map(|peer| peer.process).filter(|process| *process > 0)
    }

    /// Returns the socket, which is blocking.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Records that TLS has started, with the names in the client's certificate.
    pub fn set_certificate_names(&self, names: Vec<String>) {
        let set = self.certificate_names.set(names);
        debug_assert!(set.is_ok(), "TLS starts once");
    }

    /// Returns the names in the client's certificate, or None without TLS.
    pub fn certificate_names(&self) -> Option<&[String]> {
        self.certificate_names.get().map(|names| &names[..])
    }

    pub fn queue(&self) -> &Arc<CompletionQueue<CompletedPart>> {
        &self.queue
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Starts the end of the connection, which first replies to the requests it has received. Does nothing if
    /// the connection was cut or passed to a successor.
    pub fn drain(&self) {
        if self.enter(DRAINING, |phase| phase < DRAINING) {
            // Wakes a thread that waits to receive; data already received can still be read. Fails if the peer
            // is gone, in which case the connection ends anyway.
            let _ = shutdown(&self.socket, Shutdown::Read);
        }
    }

    /// Returns true once [`drain`](Self::drain) was called.
    pub fn is_draining(&self) -> bool {
        self.phase.load(Ordering::SeqCst) == DRAINING
    }

    /// Asks the connection to stop at the next boundary of a request, so that it can be passed to a successor.
    /// The socket is not changed.
    pub fn begin_pass(&self) {
        if self.enter(PASSING, |phase| phase == SERVING) {
            self.queue.wake();
        }
    }

    /// Returns true after [`begin_pass`](Self::begin_pass), until the connection ends or is passed.
    pub fn is_passing(&self) -> bool {
        self.phase.load(Ordering::SeqCst) == PASSING
    }

    /// Gives the socket to a successor: from now on, neither [`drain`](Self::drain) nor [`cut`](Self::cut)
    /// changes the socket. Returns false if one of them was called before.
    pub fn complete_pass(&self) -> bool {
        self.enter(PASSED, |phase| phase == PASSING)
    }

    /// Returns true after [`complete_pass`](Self::complete_pass).
    pub fn is_passed(&self) -> bool {
        self.phase.load(Ordering::SeqCst) == PASSED
    }

    /// Returns true if the connection should stop to serve its client, for any reason.
    #[inline]
    pub fn is_ending(&self) -> bool {
        self.phase.load(Ordering::SeqCst) != SERVING
    }

    /// Changes the phase if `may_change` returns true for the current one. Returns true if it did.
    fn enter(&self, next: u8, may_change: impl Fn(u8) -> bool) -> bool {
        let change = |phase| may_change(phase).then_some(next);
        self.phase.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change).is_ok()
    }

    /// Returns true if the client has closed the connection, or the side on which it sends.
    pub fn has_left(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.socket(), PollFlags::RDHUP)];
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        !fds[0].revents().is_empty()
    }

    /// Ends the connection at once. Wakes its thread from any wait except a device call. Does nothing if the
    /// connection was passed to a successor.
    pub fn cut(&self) {
        if self.enter(CUT, |phase| phase != PASSED) {
            self.queue.shut_down();
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
    }

    /// Ends the use of the socket by this process, unless the socket belongs to a successor.
    pub fn close(&self) {
        if !self.is_passed() {
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn link() -> (Link, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Link::new(1, Address::Stdin, String::new(), ours.into()).unwrap(), theirs)
    }

    #[test]
    fn passed_socket_is_never_shut_down() {
        let (link, mut client) = link();
        assert!(!link.complete_pass(), "not asked to pass");
        link.begin_pass();
        assert!(link.is_ending() && link.is_passing());
        let mut successor = UnixStream::from(link.socket().try_clone_to_owned().unwrap());
        assert!(link.complete_pass());
        for end in [Link::begin_pass, Link::drain, Link::cut, Link::close] {
            end(&link);
            assert!(link.is_passed());
        }
        drop(link);
        client.write_all(b"request").unwrap();
        successor.read_exact(&mut [0; 7]).unwrap();
        successor.write_all(b"reply").unwrap();
        client.read_exact(&mut [0; 5]).unwrap();
    }

    #[test]
    fn ended_connection_cannot_be_passed() {
        for end in [Link::drain, Link::cut] {
            let (link, mut client) = link();
            link.begin_pass();
            end(&link);
            link.begin_pass();
            assert!(link.is_ending() && !link.is_passing() && !link.complete_pass());
            assert!(client.write_all(b"request").is_err());
        }
        // A drain does not undo a cut.
        let (link, mut client) = link();
        link.cut();
        link.drain();
        assert!(!link.is_draining());
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
    }
}
