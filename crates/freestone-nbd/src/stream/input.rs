//! The receive buffer of a connection.

use std::io::{self, IoSliceMut};
use std::os::fd::BorrowedFd;

use freestone_core::mapped_buffer::MappedBuffer;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, recvmsg};

use crate::proto::RequestHeader;
pub use crate::stream::receive::ReceiveResult;
use crate::stream::receive::{receive_into, receive_result};
use crate::stream::tls::opener::{Opener, TlsClosed};

/// Size of a receive buffer in bytes: a piece of a large write, its header, and the start of the next
/// requests.
pub const RECEIVE_BUFFER_BYTES: usize = (256 << 10) + (8 << 10);
/// Unconsumed bytes up to this number are moved to the front before each receive, to make room for a large
/// receive.
const CHEAP_MOVE_BYTES: usize = 4096;
/// Maximum number of bytes received into this buffer behind a payload that goes into another one. Enough for
/// the next headers. More data of the next payload would have to be copied.
const BEHIND_BYTES: usize = 4096;

/// Received bytes that were not consumed yet: `buf[start..end]`.
#[derive(Debug)]
pub struct Input {
    buf: MappedBuffer,
    start: usize,
    end: usize,
    /// Decrypts the received bytes; `None` without TLS.
    opener: Option<Box<Opener>>,
}

impl Input {
    /// Creates an empty buffer. The payload behind a first compact header is page aligned, which makes large
    /// copies and codecs faster.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            buf: MappedBuffer::new(RECEIVE_BUFFER_BYTES, size_of::<RequestHeader>())?,
            start: 0,
            end: 0,
            opener: None,
        })
    }

    /// Returns the memory of the buffer, and of the decrypter's buffer, to the kernel, if they are empty.
    pub fn free_memory(&mut self) {
        if self.start == self.end {
            self.buf.clear();
        }
        if let Some(opener) = &mut self.opener {
            opener.free_memory();
        }
    }

    /// Puts bytes that a predecessor of the server received into the buffer, which must be empty.
    ///
    /// # Errors
    /// More than [`RECEIVE_BUFFER_BYTES`].
    pub fn fill(&mut self, bytes: &[u8]) -> io::Result<()> {
        debug_assert!(self.start == self.end, "the buffer has unconsumed data");
        let space = self.buf.get_mut(..bytes.len()).ok_or(io::ErrorKind::InvalidInput)?;
        space.copy_from_slice(bytes);
        (self.start, self.end) = (0, bytes.len());
        Ok(())
    }

    #[inline]
    pub fn data(&self) -> &[u8] {
        &self.buf[self.start..self.end]
    }

    /// Drops the first `n` unconsumed bytes.
    #[inline]
    pub fn consume(&mut self, n: usize) {
        self.start += n;
        debug_assert!(self.start <= self.end, "consumed more than was received");
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Receives once, at most `limit` bytes. First makes room for `need` bytes (at most
    /// [`RECEIVE_BUFFER_BYTES`]) from the first unconsumed byte on. Returns the result and the number of
    /// bytes received.
    #[inline]
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        flags: RecvFlags,
        need: usize,
        limit: usize,
    ) -> (ReceiveResult, usize) {
        let len = self.end - self.start;
        debug_assert!(len < need && need <= self.buf.len(), "nothing to receive");
        self.make_space(need);
        let stop = self.buf.len().min(self.end.saturating_add(limit));
        let (received, n) = receive_result(receive_into(socket, flags, &mut self.buf[self.end..stop]));
        self.end += n;
        (received, n)
    }

    /// Makes room for `need` bytes from the first unconsumed byte on.
    #[inline]
    fn make_space(&mut self, need: usize) {
        let len = self.end - self.start;
        if self.start > 0 && (len <= CHEAP_MOVE_BYTES || self.start + need > self.buf.len()) {
            self.buf.copy_within(self.start..self.end, 0);
            self.start = 0;
            self.end = len;
        }
    }

    /// Receives once into `payload`. A little of the data behind the payload, at most `limit` bytes, goes
    /// into this buffer, which must be empty. Returns the result and the total number of bytes received.
    pub fn receive_behind(
        &mut self,
        socket: BorrowedFd<'_>,
        flags: RecvFlags,
        payload: &mut [u8],
        limit: usize,
    ) -> (ReceiveResult, usize) {
        debug_assert!(self.start == self.end, "the buffer has unconsumed data");
        let len = payload.len();
        let behind = &mut self.buf[..BEHIND_BYTES.min(limit)];
        let both = rustix::io::retry_on_intr(|| {
            let slices = &mut [IoSliceMut::new(payload), IoSliceMut::new(behind)];
            recvmsg(socket, slices, &mut RecvAncillaryBuffer::default(), flags).map(|message| message.bytes)
        });
        let (received, n) = receive_result(both);
        (self.start, self.end) = (0, n.saturating_sub(len));
        (received, n)
    }
}

impl Input {
    /// Switches to TLS: `opener` decrypts the bytes received from now on. `early` is data behind the
    /// handshake that is already decrypted. The buffer must be empty.
    pub fn start_tls(&mut self, opener: Opener, early: &[u8]) {
        debug_assert!(self.start == self.end, "the buffer has plaintext");
        self.buf[..early.len()].copy_from_slice(early);
        (self.start, self.end) = (0, early.len());
        self.opener = Some(Box::new(opener));
    }

    #[inline]
    pub fn is_secure(&self) -> bool {
        self.opener.is_some()
    }

    /// Returns true if [`open`](Self::open) has data to decrypt without another receive.
    pub fn has_sealed(&self) -> bool {
        self.opener.as_ref().is_some_and(|opener| opener.is_ready())
    }

    /// Receives once, at most `limit` encrypted bytes. Returns the result and the number of encrypted bytes.
    pub fn receive_sealed(
        &mut self,
        socket: BorrowedFd<'_>,
        flags: RecvFlags,
        limit: usize,
    ) -> (ReceiveResult, usize) {
        match &mut self.opener {
            Some(opener) => receive_result(opener.receive(socket, flags, limit)),
            None => (ReceiveResult::Ended, 0),
        }
    }

    /// Decrypts received data into the buffer. First makes room for `need` bytes from the first unconsumed
    /// byte on.
    ///
    /// # Errors
    /// All data was taken, and the TLS stream has ended.
    pub fn open(&mut self, need: usize) -> Result<(), TlsClosed> {
        self.make_space(need);
        let Some(opener) = &mut self.opener else { return Err(TlsClosed) };
        self.end += opener.take(&mut self.buf[self.end..])?;
        Ok(())
    }

    /// Decrypts received data directly into `payload`. Returns the number of bytes written.
    ///
    /// # Errors
    /// All data was taken, and the TLS stream has ended.
    pub fn open_into(&mut self, payload: &mut [u8]) -> Result<usize, TlsClosed> {
        debug_assert!(self.start == self.end, "the buffer has unconsumed data");
        self.opener.as_mut().ok_or(TlsClosed)?.take(payload)
    }

    /// Decrypts the start of the next request into the buffer, which must be empty.
    ///
    /// # Errors
    /// All data was taken, and the TLS stream has ended.
    pub fn open_next_header(&mut self) -> Result<(), TlsClosed> {
        debug_assert!(self.start == self.end, "the buffer has unconsumed data");
        (self.start, self.end) = (0, 0);
        let opener = self.opener.as_mut().ok_or(TlsClosed)?;
        self.end = opener.take(&mut self.buf[..BEHIND_BYTES])?;
        Ok(())
    }
}
