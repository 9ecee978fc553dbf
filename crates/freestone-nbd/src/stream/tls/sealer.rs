//! The sending half of a TLS connection.

use std::fmt;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use rustls::crypto::cipher::{MessageEncrypter, OutboundChunks, OutboundPlainMessage};
use rustls::{ContentType, ProtocolVersion};

use super::keys::Keys;
use super::{RECORD_BYTES, RECORD_OVERHEAD_BYTES};

/// Number of records encrypted before a send. The client decrypts them while the next ones are encrypted.
const BATCH_RECORDS: usize = 8;
/// Largest size of a batch of encrypted records, in bytes.
pub const BATCH_BYTES: usize = BATCH_RECORDS * (RECORD_BYTES + RECORD_OVERHEAD_BYTES);
/// Content of the key update message and of the close alert.
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];
const CLOSE_NOTIFY: [u8; 2] = [1, 0];

pub struct Sealer {
    keys: Rc<Keys>,
    encrypter: Box<dyn MessageEncrypter>,
    /// Sequence number of the next record.
    number: u64,
    /// Maximum number of records encrypted with one key.
    pub(super) records_max: u64,
    /// Encrypted records of the current batch; empty between sends.
    records: Vec<Vec<u8>>,
}

impl Sealer {
    pub fn new(keys: Rc<Keys>, encrypter: Box<dyn MessageEncrypter>, number: u64) -> Self {
        // Half of the limit, as the records of the handshake used the same key.
        let records_max = keys.records_max() / 2;
        Self { keys, encrypter, number, records_max, records: Vec::new() }
    }

    /// Encrypts and sends all parts, and blocks while the socket accepts no more. Returns the number of
    /// system calls.
    ///
    /// # Errors
    /// Errors of the system calls. [`Errno::PROTO`] if encryption fails, or a TLS 1.2 key has reached its
    /// record limit and cannot be updated.
    pub fn send<'a>(
        &mut self,
        socket: BorrowedFd<'_>,
        parts: impl Iterator<Item = &'a [u8]>,
    ) -> Result<u64, Errno> {
        let mut sends = 0;
        let mut chunks: Vec<&[u8]> = Vec::new();
        let mut len = 0;
        for mut part in parts {
            while !part.is_empty() {
                let (piece, rest) = part.split_at(part.len().min(RECORD_BYTES - len));
                chunks.push(piece);
                (part, len) = (rest, len + piece.len());
                if len == RECORD_BYTES {
                    self.seal_data(&chunks)?;
                    chunks.clear();
                    len = 0;
                    if self.records.len() >= BATCH_RECORDS {
                        sends += self.flush(socket, SendFlags::empty())?;
                    }
                }
            }
        }
        if len > 0 {
            self.seal_data(&chunks)?;
        }
        Ok(sends + self.flush(socket, SendFlags::empty())?)
    }

    /// Sends the close alert if the socket accepts it without blocking.
    pub fn close(&mut self, socket: BorrowedFd<'_>) {
        self.records.clear();
        let closed = self.seal(ContentType::Alert, OutboundChunks::Single(&CLOSE_NOTIFY));
        if closed.is_ok() {
            // If the alert is lost, the client sees the end of the stream.
            let _ = self.flush(socket, SendFlags::DONTWAIT);
        }
    }

    fn seal_data(&mut self, chunks: &[&[u8]]) -> Result<(), Errno> {
        let is_used_up = self.number >= self.records_max;
        if self.keys.take_update_request() || is_used_up {
            self.change_key()?;
        }
        self.seal(ContentType::ApplicationData, OutboundChunks::new(chunks))
    }

    /// Encrypts a key update message with the old key, and updates the key.
    #[cold]
    fn change_key(&mut self) -> Result<(), Errno> {
        if !self.keys.can_change() {
            tracing::info!("the record limit of a TLS 1.2 key is reached: the connection ends");
            return Err(Errno::PROTO);
        }
        self.seal(ContentType::Handshake, OutboundChunks::Single(&KEY_UPDATE))?;
        (self.number, self.encrypter) = self.keys.next_encrypter().map_err(|_| Errno::PROTO)?;
        Ok(())
    }

    fn seal(&mut self, typ: ContentType, payload: OutboundChunks<'_>) -> Result<(), Errno> {
        let plain = OutboundPlainMessage { typ, version: ProtocolVersion::TLSv1_2, payload };
        let record = self.encrypter.encrypt(plain, self.number).map_err(|_| Errno::PROTO)?;
        self.number += 1;
        self.records.push(record.encode());
        Ok(())
    }

    /// Sends the encrypted records. Returns the number of system calls. No record is left afterwards, even on
    /// error.
    fn flush(&mut self, socket: BorrowedFd<'_>, flags: SendFlags) -> Result<u64, Errno> {
        let records = std::mem::take(&mut self.records);
        let result = send_all(socket, &records, flags);
        self.records = records;
        self.records.clear();
        result
    }
}

fn send_all(socket: BorrowedFd<'_>, records: &[Vec<u8>], flags: SendFlags) -> Result<u64, Errno> {
    let mut slices: Vec<_> = records.iter().map(|record| IoSlice::new(record)).collect();
    let mut slices = &mut slices[..];
    let mut sends = 0;
    while !slices.is_empty() {
        let n = rustix::io::retry_on_intr(|| {
            sendmsg(socket, slices, &mut SendAncillaryBuffer::default(), flags | SendFlags::NOSIGNAL)
        })?;
        IoSlice::advance_slices(&mut slices, n);
        sends += 1;
    }
    Ok(sends)
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealer").field("number", &self.number).finish_non_exhaustive()
    }
}
