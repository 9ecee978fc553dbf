//! The receive buffer of a connection.

use std::io::{self, IoSliceMut};
use std::os::fd::BorrowedFd;

use freestone_core::mapped::Mapped;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, recv, recvmsg};

use crate::proto::RequestHeader;

/// Size of a receive buffer in bytes: one piece of a large write, and the begin of what follows it.
pub const RECEIVE_BUFFER_BYTES: usize = (256 << 10) + (8 << 10);
/// Up to this many bytes are moved to the front before each receive, to leave room for a large one.
const CHEAP_MOVE_BYTES: usize = 4096;
/// What is received behind a payload that goes elsewhere: the next headers, and little of a payload,
/// which would have to be copied.
const BEHIND_BYTES: usize = 4096;

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
    buf: Mapped,
    start: usize,
    end: usize,
}

impl Input {
    /// An empty buffer. The payload behind a first header begins a page: large copies, and codecs,
    /// are faster there.
    ///
    /// # Errors
    /// No memory is left.
    pub fn new() -> io::Result<Self> {
        Ok(Self { buf: Mapped::new(RECEIVE_BUFFER_BYTES, size_of::<RequestHeader>())?, start: 0, end: 0 })
    }

    /// Gives the memory back; nothing is in it.
    pub fn rest(&mut self) {
        if self.start == self.end {
            self.buf.clear();
        }
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
    /// [`RECEIVE_BUFFER_BYTES`]) fit from the first unconsumed byte on. Returns the bytes too.
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        flags: RecvFlags,
        need: usize,
        limit: usize,
    ) -> (Received, usize) {
        let len = self.end - self.start;
        debug_assert!(len < need && need <= self.buf.len(), "nothing to receive");
        if self.start > 0 && (len <= CHEAP_MOVE_BYTES || self.start + need > self.buf.len()) {
            self.buf.copy_within(self.start..self.end, 0);
            self.start = 0;
            self.end = len;
        }
        let stop = self.buf.len().min(self.end.saturating_add(limit));
        let (received, n) = outcome(receive_into(socket, flags, &mut self.buf[self.end..stop]));
        self.end += n;
        (received, n)
    }

    /// Receives once into `payload`, and, if there is more, a little of what follows it, at most
    /// `limit` bytes, into this buffer, which is empty. Returns the bytes of both together.
    pub fn receive_behind(
        &mut self,
        socket: BorrowedFd<'_>,
        flags: RecvFlags,
        payload: &mut [u8],
        limit: usize,
    ) -> (Received, usize) {
        debug_assert!(self.start == self.end, "what came first is consumed first");
        let len = payload.len();
        let behind = &mut self.buf[..BEHIND_BYTES.min(limit)];
        let both = rustix::io::retry_on_intr(|| {
            let slices = &mut [IoSliceMut::new(payload), IoSliceMut::new(behind)];
            recvmsg(socket, slices, &mut RecvAncillaryBuffer::default(), flags).map(|message| message.bytes)
        });
        let (received, n) = outcome(both);
        (self.start, self.end) = (0, n.saturating_sub(len));
        (received, n)
    }
}

/// What a receive system call brought, and how many bytes.
fn outcome(bytes: Result<usize, Errno>) -> (Received, usize) {
    match bytes {
        Ok(0) => (Received::End, 0),
        Ok(n) => (Received::Data, n),
        Err(Errno::WOULDBLOCK) => (Received::WouldBlock, 0),
        Err(_) => (Received::End, 0),
    }
}

/// One receive system call; 0 is the end of the stream.
pub fn receive_into(socket: BorrowedFd<'_>, flags: RecvFlags, buf: &mut [u8]) -> Result<usize, Errno> {
    rustix::io::retry_on_intr(|| recv(socket, &mut *buf, flags).map(|(n, _)| n))
}
