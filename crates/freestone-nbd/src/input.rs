//! The receive buffer of a connection.

use std::io::{self, IoSliceMut};
use std::os::fd::BorrowedFd;

use freestone_core::mapped::Mapped;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, recvmsg};

use crate::proto::RequestHeader;
pub use crate::receive::Received;
use crate::receive::{outcome, receive_into};
use crate::tls::opener::{Closed, Opener};

/// Size of a receive buffer in bytes: one piece of a large write, and the begin of what follows it.
pub const RECEIVE_BUFFER_BYTES: usize = (256 << 10) + (8 << 10);
/// Up to this many bytes are moved to the front before each receive, to leave room for a large one.
const CHEAP_MOVE_BYTES: usize = 4096;
/// What is received behind a payload that goes elsewhere: the next headers, and little of a payload,
/// which would have to be copied.
const BEHIND_BYTES: usize = 4096;

/// Bytes that were received and not consumed yet: `buf[start..end]`.
#[derive(Debug)]
pub struct Input {
    buf: Mapped,
    start: usize,
    end: usize,
    /// What the bytes come through, by TLS.
    opener: Option<Box<Opener>>,
}

impl Input {
    /// An empty buffer. The payload behind a first header begins a page: large copies, and codecs,
    /// are faster there.
    ///
    /// # Errors
    /// No memory is left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            buf: Mapped::new(RECEIVE_BUFFER_BYTES, size_of::<RequestHeader>())?,
            start: 0,
            end: 0,
            opener: None,
        })
    }

    /// Gives the memory back; nothing is in it.
    pub fn rest(&mut self) {
        if self.start == self.end {
            self.buf.clear();
        }
        if let Some(opener) = &mut self.opener {
            opener.rest();
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
    #[inline]
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        flags: RecvFlags,
        need: usize,
        limit: usize,
    ) -> (Received, usize) {
        let len = self.end - self.start;
        debug_assert!(len < need && need <= self.buf.len(), "nothing to receive");
        self.make_room(need);
        let stop = self.buf.len().min(self.end.saturating_add(limit));
        let (received, n) = outcome(receive_into(socket, flags, &mut self.buf[self.end..stop]));
        self.end += n;
        (received, n)
    }

    /// From the first unconsumed byte on `need` bytes fit.
    #[inline]
    fn make_room(&mut self, need: usize) {
        let len = self.end - self.start;
        if self.start > 0 && (len <= CHEAP_MOVE_BYTES || self.start + need > self.buf.len()) {
            self.buf.copy_within(self.start..self.end, 0);
            self.start = 0;
            self.end = len;
        }
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

/// By TLS.
impl Input {
    /// What comes from now on is opened by this; `early` was already. Nothing else is here.
    pub fn secure(&mut self, opener: Opener, early: &[u8]) {
        debug_assert!(self.start == self.end, "what came in clear is thrown away before");
        self.buf[..early.len()].copy_from_slice(early);
        (self.start, self.end) = (0, early.len());
        self.opener = Some(Box::new(opener));
    }

    /// Whether bytes come by TLS.
    #[inline]
    pub fn is_secure(&self) -> bool {
        self.opener.is_some()
    }

    /// Whether something is here that is to be [opened](Self::open) before more is received.
    pub fn has_sealed(&self) -> bool {
        self.opener.as_ref().is_some_and(|opener| opener.is_ready())
    }

    /// Receives once, at most `limit` bytes, which are to be opened; returns them.
    pub fn receive_sealed(
        &mut self,
        socket: BorrowedFd<'_>,
        flags: RecvFlags,
        limit: usize,
    ) -> (Received, usize) {
        match &mut self.opener {
            Some(opener) => outcome(opener.receive(socket, flags, limit)),
            None => (Received::End, 0),
        }
    }

    /// Opens what was received, as far as it is here, so that in the end `need` bytes fit from the
    /// first unconsumed one on.
    ///
    /// # Errors
    /// No more will come.
    pub fn open(&mut self, need: usize) -> Result<(), Closed> {
        self.make_room(need);
        let Some(opener) = &mut self.opener else { return Err(Closed) };
        self.end += opener.take(&mut self.buf[self.end..])?;
        Ok(())
    }

    /// The same into `payload`, and no more. Returns the bytes.
    ///
    /// # Errors
    /// No more will come.
    pub fn open_into(&mut self, payload: &mut [u8]) -> Result<usize, Closed> {
        debug_assert!(self.start == self.end, "what came first is consumed first");
        self.opener.as_mut().ok_or(Closed)?.take(payload)
    }

    /// The same into the buffer, which is empty, and little of it: what the next request is.
    ///
    /// # Errors
    /// No more will come.
    pub fn open_begin(&mut self) -> Result<(), Closed> {
        debug_assert!(self.start == self.end, "what came first is consumed first");
        (self.start, self.end) = (0, 0);
        let opener = self.opener.as_mut().ok_or(Closed)?;
        self.end = opener.take(&mut self.buf[..BEHIND_BYTES])?;
        Ok(())
    }
}
