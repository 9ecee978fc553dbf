//! The state that the server and the thread of a connection share.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use freestone_core::allow::peer_of;
use freestone_core::answers::Answers;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};

use crate::address::Address;
use crate::flight::CompletedPart;
use crate::stats::Counters;

/// A connection, as its server sees it.
#[derive(Debug)]
pub struct Link {
    /// Identifier, unique in its server.
    pub id: u64,
    /// The address at which the connection was accepted.
    pub address: Address,
    peer: String,
    socket: OwnedFd,
    queue: Arc<Answers<CompletedPart>>,
    draining: AtomicBool,
    /// The names in the client's certificate, set when TLS has started.
    client: OnceLock<Vec<String>>,
    counters: Counters,
}

impl Link {
    /// Creates the link of an accepted socket.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn new(id: u64, address: Address, peer: String, socket: OwnedFd) -> std::io::Result<Self> {
        let queue = Arc::new(Answers::new()?);
        let draining = AtomicBool::new(false);
        let (client, counters) = (OnceLock::new(), Counters::default());
        Ok(Self { id, address, peer, socket, queue, draining, client, counters })
    }

    /// Returns the description of the peer, for logs.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Returns the process at the other end of a Unix socket, if it is known.
    pub fn process(&self) -> Option<i32> {
        peer_of(self.socket.as_fd()).map(|peer| peer.process).filter(|process| *process > 0)
    }

    /// Returns the socket, which is blocking.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Records that TLS has started, with the names in the client's certificate.
    pub fn secure(&self, names: Vec<String>) {
        let set = self.client.set(names);
        debug_assert!(set.is_ok(), "TLS starts once");
    }

    /// Returns the names in the client's certificate, or None without TLS.
    pub fn client(&self) -> Option<&[String]> {
        self.client.get().map(|names| &names[..])
    }

    pub fn queue(&self) -> &Arc<Answers<CompletedPart>> {
        &self.queue
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Ends the connection after replies to the requests received.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        // Wakes a thread that waits to receive; data already received can still be read. Fails if the peer is
        // gone, which is fine.
        let _ = shutdown(&self.socket, Shutdown::Read);
    }

    /// Returns true after [`drain`](Self::drain).
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Returns true if the client sends no more.
    pub fn has_left(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.socket(), PollFlags::RDHUP)];
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        !fds[0].revents().is_empty()
    }

    /// Ends the connection at once. Wakes its thread from any wait except a device call.
    pub fn cut(&self) {
        self.queue.end();
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}
