//! What the server and the thread of a connection share.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use freestone_core::answers::Answers;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};

use crate::address::Address;
use crate::flight::Finished;
use crate::stats::Counters;

/// A connection as its server sees it.
#[derive(Debug)]
pub struct Link {
    /// Unique in its server.
    pub id: u64,
    /// Where it came in.
    pub address: Address,
    peer: String,
    socket: OwnedFd,
    queue: Arc<Answers<Finished>>,
    draining: AtomicBool,
    /// From when TLS is there: the names in the client's certificate.
    client: OnceLock<Vec<String>>,
    counters: Counters,
}

impl Link {
    /// A link for an accepted socket.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn new(id: u64, address: Address, peer: String, socket: OwnedFd) -> std::io::Result<Self> {
        let queue = Arc::new(Answers::new()?);
        let draining = AtomicBool::new(false);
        let (client, counters) = (OnceLock::new(), Counters::default());
        Ok(Self { id, address, peer, socket, queue, draining, client, counters })
    }

    /// Who is at the other end, for logs.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// The socket; it blocks.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The connection is by TLS now, and the client's certificate has these names, if it has one.
    pub fn secure(&self, names: Vec<String>) {
        let set = self.client.set(names);
        debug_assert!(set.is_ok(), "TLS starts once");
    }

    /// By TLS: the names in the client's certificate.
    pub fn client(&self) -> Option<&[String]> {
        self.client.get().map(|names| &names[..])
    }

    /// Where the device's answers arrive.
    pub fn queue(&self) -> &Arc<Answers<Finished>> {
        &self.queue
    }

    /// The counters of its thread.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The connection is to end when it has answered what it received.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        // Wakes a thread that waits to receive; what has arrived can still be read. A peer that is
        // gone is as good.
        let _ = shutdown(&self.socket, Shutdown::Read);
    }

    /// Whether [`drain`](Self::drain) was called.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Whether the client sends no more.
    pub fn has_left(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.socket(), PollFlags::RDHUP)];
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        !fds[0].revents().is_empty()
    }

    /// The connection is to end now: wakes its thread from whatever it waits for, devices excepted.
    pub fn cut(&self) {
        self.queue.end();
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}
