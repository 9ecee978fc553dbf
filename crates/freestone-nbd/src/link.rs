//! The state that the server and the thread of a connection share.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
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
    draining: AtomicBool,
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
        let draining = AtomicBool::new(false);
        let (client, counters) = (OnceLock::new(), Counters::default());
        Ok(Self { id, address, peer, socket, queue, draining, certificate_names: client, counters })
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

    /// Starts the end of the connection, which first replies to the requests it has received.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        // Wakes a thread that waits to receive; data already received can still be read. Fails if the peer is
        // gone, in which case the connection ends anyway.
        let _ = shutdown(&self.socket, Shutdown::Read);
    }

    /// Returns true once [`drain`](Self::drain) was called.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Returns true if the client has closed the connection, or the side on which it sends.
    pub fn has_left(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.socket(), PollFlags::RDHUP)];
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        !fds[0].revents().is_empty()
    }

    /// Ends the connection at once. Wakes its thread from any wait except a device call.
    pub fn cut(&self) {
        self.queue.shut_down();
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}
