//! The receiving half of a TLS connection. Records are decrypted in the receive buffer.

use std::fmt;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use freestone_core::mapped_buffer::MappedBuffer;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustls::crypto::cipher::{InboundOpaqueMessage, MessageDecrypter};
use rustls::{ContentType, ProtocolVersion};

use super::keys::Keys;
use super::{RECORD_BYTES, RECORD_HEADER_BYTES, RECORD_OVERHEAD_BYTES};
use crate::stream::receive::receive_into;

/// Size of the buffer for encrypted data, in bytes. Large enough to receive a large request at once.
pub const SEALED_BUFFER_BYTES: usize = 272 << 10;
/// The version in a record header, that of TLS 1.2. TLS 1.3 uses the same.
const VERSION: [u8; 2] = [3, 3];
/// Type and length of a key update message.
const KEY_UPDATE: [u8; 4] = [24, 0, 0, 1];

const _: () =
    assert!(SEALED_BUFFER_BYTES >= 2 * (RECORD_HEADER_BYTES + RECORD_BYTES + RECORD_OVERHEAD_BYTES));

/// The client ended TLS or sent an invalid record. Later data is ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TlsClosed;

pub struct Opener {
    keys: Rc<Keys>,
    decrypter: Box<dyn MessageDecrypter>,
    /// Sequence number of the next record.
    number: u64,
    /// Decrypted data in the range `opened`, then encrypted data from `sealed` to `end`.
    buf: MappedBuffer,
    /// Range of the last record's decrypted data that was not taken yet.
    opened: Range<usize>,
    /// Position of the next record in `buf`.
    sealed: usize,
    end: usize,
    is_closed: bool,
}

impl Opener {
    /// Creates the opener after the handshake. `left` is the range of `buf` with bytes that the handshake did
    /// not process.
    pub fn new(
        keys: Rc<Keys>,
        decrypter: Box<dyn MessageDecrypter>,
        number: u64,
        buf: MappedBuffer,
        left: Range<usize>,
    ) -> Self {
        let (sealed, end) = (left.start, left.end);
        Self { keys, decrypter, number, buf, opened: 0..0, sealed, end, is_closed: false }
    }

    /// Returns true if [`take`](Self::take) returns data or an error without another receive.
    pub fn is_ready(&self) -> bool {
        !self.opened.is_empty() || self.is_closed || self.record().is_some()
    }

    /// Returns the range of the next record if it is complete, else None. A record of invalid length is
    /// returned too, and fails later.
    fn record(&self) -> Option<Range<usize>> {
        let bytes = &self.buf[self.sealed..self.end];
        let header = bytes.first_chunk::<RECORD_HEADER_BYTES>()?;
        let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
        let is_possible = len <= RECORD_BYTES + RECORD_OVERHEAD_BYTES;
        (!is_possible || RECORD_HEADER_BYTES + len <= bytes.len())
            .then(|| self.sealed..self.sealed + RECORD_HEADER_BYTES + len)
    }

    /// Receives once, at most `limit` bytes. Called only if the opener is not [ready](Self::is_ready).
    /// Returns the number of bytes; 0 is the end of the stream.
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        flags: RecvFlags,
        limit: usize,
    ) -> Result<usize, Errno> {
        debug_assert!(!self.is_ready(), "decrypted data was not taken");
        // Moves at most an incomplete record.
        self.buf.copy_within(self.sealed..self.end, 0);
        (self.sealed, self.end) = (0, self.end - self.sealed);
        let stop = self.buf.len().min(self.end.saturating_add(limit));
        let n = receive_into(socket, flags, &mut self.buf[self.end..stop])?;
        self.end += n;
        Ok(n)
    }

    /// Copies decrypted data into `out`, as much as is available and fits. Returns the number of bytes.
    ///
    /// # Errors
    /// All data was taken, and the TLS stream has ended.
    pub fn take(&mut self, out: &mut [u8]) -> Result<usize, TlsClosed> {
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
        if filled == 0 && self.is_closed { Err(TlsClosed) } else { Ok(filled) }
    }

    /// Decrypts the next record. Returns false if no complete record is available, or TLS has ended.
    fn open_next(&mut self) -> bool {
        if self.is_closed {
            return false;
        }
        let Some(record) = self.record() else { return false };
        let opened = if record.end <= self.end { self.open(&record) } else { Err(TlsClosed) };
        self.sealed = record.end.min(self.end);
        match opened {
            Ok(opened) => self.opened = opened,
            Err(TlsClosed) => self.is_closed = true,
        }
        !self.is_closed
    }

    /// Decrypts a record, and handles a key update. Returns the range of the decrypted data in `buf`.
    fn open(&mut self, record: &Range<usize>) -> Result<Range<usize>, TlsClosed> {
        let start = record.start + RECORD_HEADER_BYTES;
        let [kind, version @ .., _, _] =
            self.buf[record.start..].first_chunk::<RECORD_HEADER_BYTES>().ok_or(TlsClosed)?;
        let kind = ContentType::from(*kind);
        // The cipher of TLS 1.3 does not authenticate these header fields.
        if *version != VERSION || (self.keys.can_change() && kind != ContentType::ApplicationData) {
            return Err(TlsClosed);
        }
        let bytes = &mut self.buf[start..record.end];
        let base = bytes.as_ptr().addr();
        let sealed = InboundOpaqueMessage::new(kind, ProtocolVersion::TLSv1_2, bytes);
        // A tampered record may be partly decrypted now, but its data is never used.
        let plain = self.decrypter.decrypt(sealed, self.number).map_err(|_| TlsClosed)?;
        self.number = self.number.checked_add(1).ok_or(TlsClosed)?;
        match plain.typ {
            ContentType::ApplicationData => {
                let at = start + (plain.payload.as_ptr().addr() - base);
                Ok(at..at + plain.payload.len())
            }
            ContentType::Handshake => {
                let &[a, b, c, d, wants_update] = plain.payload else { return Err(TlsClosed) };
                if [a, b, c, d] != KEY_UPDATE || wants_update > 1 || !self.keys.can_change() {
                    return Err(TlsClosed);
                }
                (self.number, self.decrypter) = self.keys.next_decrypter().map_err(|_| TlsClosed)?;
                if wants_update == 1 {
                    self.keys.request_update();
                }
                Ok(0..0)
            }
            // TLS ends at an alert or at an invalid content type.
            _ => Err(TlsClosed),
        }
    }

    /// Returns the memory to the kernel if the buffer is empty.
    pub fn free_memory(&mut self) {
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
