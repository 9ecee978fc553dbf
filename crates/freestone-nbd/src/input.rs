//! The receive buffer of a connection.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// Size of a receive buffer in bytes: one piece of a large write, and the begin of what follows it.
pub const RECEIVE_BUFFER_BYTES: usize = (256 << 10) + (8 << 10);
/// Up to this many bytes are moved to the front before each receive, to leave room for a large one.
const CHEAP_MOVE_BYTES: usize = 4096;

/// What a receive brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// At least one byte.
    Data,
    /// Nothing yet.
    WouldBlock,
    /// The peer sends no more, or the connection broke.
    End,
}

/// Bytes that were received and not consumed yet: `buf[start..end]`.
#[derive(Debug)]
pub struct Input {
    buf: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Input {
    /// An empty buffer. Its memory is touched as far as it gets used.
    pub fn new() -> Self {
        Self { buf: vec![0; RECEIVE_BUFFER_BYTES].into_boxed_slice(), start: 0, end: 0 }
    }

    /// The received bytes.
    #[inline]
    pub fn data(&self) -> &[u8] {
        &self.buf[self.start..self.end]
    }

    /// Drops the first `n` received bytes.
    #[inline]
    pub fn consume(&mut self, n: usize) {
        self.start += n;
        debug_assert!(self.start <= self.end, "consumed more than was received");
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Receives once, at most `limit` bytes, so that in the end `need` bytes (at most
    /// [`RECEIVE_BUFFER_BYTES`]) fit from the first unconsumed byte on.
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        flags: RecvFlags,
        need: usize,
        limit: usize,
    ) -> Received {
        let len = self.end - self.start;
        debug_assert!(len < need && need <= self.buf.len(), "nothing to receive");
        if self.start > 0 && (len <= CHEAP_MOVE_BYTES || self.start + need > self.buf.len()) {
            self.buf.copy_within(self.start..self.end, 0);
            self.start = 0;
            self.end = len;
        }
        let stop = self.buf.len().min(self.end.saturating_add(limit));
        match receive_into(socket, flags, &mut self.buf[self.end..stop]) {
            Ok(0) => Received::End,
            Ok(n) => {
                self.end += n;
                Received::Data
            }
            Err(Errno::WOULDBLOCK) => Received::WouldBlock,
            Err(_) => Received::End,
        }
    }
}

/// One receive system call; 0 is the end of the stream.
pub fn receive_into(socket: BorrowedFd<'_>, flags: RecvFlags, buf: &mut [u8]) -> Result<usize, Errno> {
    rustix::io::retry_on_intr(|| recv(socket, &mut *buf, flags).map(|(n, _)| n))
}
