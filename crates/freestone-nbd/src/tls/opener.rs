//! What comes from a client by TLS: received sealed, opened where it lies.

use std::fmt;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use freestone_core::mapped::Mapped;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustls::crypto::cipher::{InboundOpaqueMessage, MessageDecrypter};
use rustls::{ContentType, ProtocolVersion};

use super::keys::Keys;
use super::{RECORD_BYTES, RECORD_HEADER_BYTES, RECORD_OVERHEAD_BYTES};
use crate::receive::receive_into;

/// Room for what was received and is still sealed, in bytes: a large request at once.
pub const SEALED_BUFFER_BYTES: usize = 272 << 10;
/// The version in the header of a record, of 1.3 as well.
const VERSION: [u8; 2] = [3, 3];
/// Type and length of a message that exchanges keys.
const KEY_UPDATE: [u8; 4] = [24, 0, 0, 1];

const _: () =
    assert!(SEALED_BUFFER_BYTES >= 2 * (RECORD_HEADER_BYTES + RECORD_BYTES + RECORD_OVERHEAD_BYTES));

/// The client ended TLS, or broke it: nothing after that is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Closed;

/// The receiving half of a TLS connection.
pub struct Opener {
    keys: Rc<Keys>,
    decrypter: Box<dyn MessageDecrypter>,
    /// Number of the next record.
    number: u64,
    /// `opened`, then what is sealed, up to `end`.
    buf: Mapped,
    /// Data of the record that was opened last and not taken yet.
    opened: Range<usize>,
    /// Where the next record begins.
    sealed: usize,
    end: usize,
    is_closed: bool,
}

impl Opener {
    /// Goes on behind the handshake, with what it left in `buf`.
    pub fn new(
        keys: Rc<Keys>,
        decrypter: Box<dyn MessageDecrypter>,
        number: u64,
        buf: Mapped,
        left: Range<usize>,
    ) -> Self {
        let (sealed, end) = (left.start, left.end);
        Self { keys, decrypter, number, buf, opened: 0..0, sealed, end, is_closed: false }
    }

    /// Whether there is something to take, or nothing ever will be, without another receive.
    pub fn is_ready(&self) -> bool {
        !self.opened.is_empty() || self.is_closed || self.record().is_some()
    }

    /// The next record where it is here as a whole, or as much of it as shows that it cannot be.
    fn record(&self) -> Option<Range<usize>> {
        let bytes = &self.buf[self.sealed..self.end];
        let header = bytes.first_chunk::<RECORD_HEADER_BYTES>()?;
        let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
        let is_possible = len <= RECORD_BYTES + RECORD_OVERHEAD_BYTES;
        (!is_possible || RECORD_HEADER_BYTES + len <= bytes.len())
            .then(|| self.sealed..self.sealed + RECORD_HEADER_BYTES + len)
    }

    /// Receives once, at most `limit` bytes, when nothing [is ready](Self::is_ready). Returns them;
    /// 0 is the end of the stream.
    ///
    /// # Errors
    /// Those of the system call.
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        flags: RecvFlags,
        limit: usize,
    ) -> Result<usize, Errno> {
        debug_assert!(!self.is_ready(), "what is here is taken first");
        // At most the begin of one record.
        self.buf.copy_within(self.sealed..self.end, 0);
        (self.sealed, self.end) = (0, self.end - self.sealed);
        let stop = self.buf.len().min(self.end.saturating_add(limit));
        let n = receive_into(socket, flags, &mut self.buf[self.end..stop])?;
        self.end += n;
        Ok(n)
    }

    /// Puts data into `out`, as much as is here and fits. Returns the bytes.
    ///
    /// # Errors
    /// Nothing is here any more, and nothing will come.
    pub fn take(&mut self, out: &mut [u8]) -> Result<usize, Closed> {
        let mut filled = 0;
        while filled < out.len() {
            if self.opened.is_empty() && !self.open_next() {
                break;
            }
            let n = self.opened.len().min(out.len() - filled);
            out[filled..filled + n].copy_from_slice(&self.buf[self.opened.start..self.opened.start + n]);
            self.opened.start += n;
            filled += n;
        }
        if filled == 0 && self.is_closed { Err(Closed) } else { Ok(filled) }
    }

    /// Opens the next record. False: there is none.
    fn open_next(&mut self) -> bool {
        if self.is_closed {
            return false;
        }
        let Some(record) = self.record() else { return false };
        let opened = if record.end <= self.end { self.open(&record) } else { Err(Closed) };
        self.sealed = record.end.min(self.end);
        match opened {
            Ok(opened) => self.opened = opened,
            Err(Closed) => self.is_closed = true,
        }
        !self.is_closed
    }

    /// Opens a record, and does what it asks for where it is no data.
    fn open(&mut self, record: &Range<usize>) -> Result<Range<usize>, Closed> {
        let start = record.start + RECORD_HEADER_BYTES;
        let [kind, version @ .., _, _] =
            self.buf[record.start..].first_chunk::<RECORD_HEADER_BYTES>().ok_or(Closed)?;
        let kind = ContentType::from(*kind);
        // The cipher of TLS 1.3 does not look at these.
        if *version != VERSION || (self.keys.can_change() && kind != ContentType::ApplicationData) {
            return Err(Closed);
        }
        let bytes = &mut self.buf[start..record.end];
        let base = bytes.as_ptr().addr();
        let sealed = InboundOpaqueMessage::new(kind, ProtocolVersion::TLSv1_2, bytes);
        // The begin of one that was tampered with may be decrypted now: it is never looked at.
        let plain = self.decrypter.decrypt(sealed, self.number).map_err(|_| Closed)?;
        self.number = self.number.checked_add(1).ok_or(Closed)?;
        match plain.typ {
            ContentType::ApplicationData => {
                let at = start + (plain.payload.as_ptr().addr() - base);
                Ok(at..at + plain.payload.len())
            }
            ContentType::Handshake => {
                let &[a, b, c, d, wants_answer] = plain.payload else { return Err(Closed) };
                if [a, b, c, d] != KEY_UPDATE || wants_answer > 1 || !self.keys.can_change() {
                    return Err(Closed);
                }
                (self.number, self.decrypter) = self.keys.next_decrypter().map_err(|_| Closed)?;
                if wants_answer == 1 {
                    self.keys.ask_for_answer();
                }
                Ok(0..0)
            }
            // Alerts, and what nobody sends.
            _ => Err(Closed),
        }
    }

    /// Gives the memory back, where nothing is in it.
    pub fn rest(&mut self) {
        if self.opened.is_empty() && self.sealed == self.end {
            self.buf.clear();
        }
    }
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opener").field("number", &self.number).finish_non_exhaustive()
    }
}
