//! Send queue of a connection: headers and small payloads in one buffer, large payloads directly
//! from the requests.

use std::io::IoSlice;

use freestone_core::sync::Instant;
use freestone_nbd_proto::{CommandFlags, REQUEST_MAGIC, RequestHeader, command};
use zerocopy::IntoBytes as _;

use crate::error::LinkError;
use crate::link::Link;
use crate::requests::job::{Job, Piece};
use crate::requests::table::CommandTable;

/// Largest payload that is copied behind its header, in bytes.
const COPY_MAX_BYTES: usize = 16 << 10;
/// Number of buffered bytes at which no command is added until they are sent.
const FULL_BYTES: usize = 64 << 10;

/// Commands that are ready to be sent.
#[derive(Default)]
pub struct Outgoing {
    bytes: Vec<u8>,
    /// Number of bytes of `bytes` already sent.
    sent_bytes: usize,
    /// Cookie of a large payload that follows `bytes`, and the number of its bytes already sent.
    data: Option<(u64, usize)>,
}

impl Outgoing {
    pub fn has_room(&self) -> bool {
        self.data.is_none() && self.bytes.len() < FULL_BYTES
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.data.is_none()
    }

    /// Adds a command to the queue and to `table`. Requires [`has_room`](Self::has_room).
    pub fn add(&mut self, table: &mut CommandTable, job: Box<Job>, piece: Piece) {
        let payload = piece.payload();
        let small = payload.len() <= COPY_MAX_BYTES;
        let copied = if small { payload.clone() } else { 0..0 };
        let start = self.bytes.len();
        self.bytes.extend([0; size_of::<RequestHeader>()]);
        self.bytes.extend(&job.buffer[copied]);
        let cookie = table.add(job, piece);
        let header = header(&piece, cookie);
        self.bytes[start..start + size_of::<RequestHeader>()].copy_from_slice(header.as_bytes());
        self.data = (!small).then_some((cookie, 0));
    }

    /// Sends the DISC command. The server sends no reply to it.
    pub fn send_disconnect(link: &mut Link) {
        let piece = Piece { command: command::DISC, flags: CommandFlags::empty(), offset: 0, len: 0, at: 0 };
        // If this fails, the server still sees the connection close.
        let _ = link.send(&[IoSlice::new(header(&piece, 0).as_bytes())]);
    }

    /// Sends as much as possible without blocking. Returns true if anything was sent.
    pub fn send(&mut self, link: &mut Link, table: &mut CommandTable) -> Result<bool, LinkError> {
        let mut moved = false;
        loop {
            let bytes = &self.bytes[self.sent_bytes..];
            let sent = match self.data {
                None if bytes.is_empty() && !link.has_unsent() => return Ok(moved),
                None => link.send(&[IoSlice::new(bytes)])?,
                Some((cookie, from)) => {
                    let Some(sent) = table.get(cookie) else { return Err(EARLY_REPLY) };
                    let data = &sent.job.buffer[sent.piece.payload()][from..];
                    link.send(&[IoSlice::new(bytes), IoSlice::new(data)])?
                }
            };
            if sent == 0 {
                return Ok(moved);
            }
            moved = true;
            let of_bytes = sent.min(bytes.len());
            self.sent_bytes += of_bytes;
            if self.sent_bytes == self.bytes.len() {
                self.bytes.clear();
                self.sent_bytes = 0;
            }
            if let Some((cookie, from)) = &mut self.data {
                *from += sent - of_bytes;
                let Some(sent) = table.get(*cookie) else { return Err(EARLY_REPLY) };
                sent.last_progress = Instant::now();
                if *from == sent.piece.payload().len() {
                    self.data = None;
                }
            }
        }
    }
}

const EARLY_REPLY: LinkError = LinkError::Protocol("it replied to a write before it had the data");

fn header(piece: &Piece, cookie: u64) -> RequestHeader {
    RequestHeader {
        magic: REQUEST_MAGIC.into(),
        flags: piece.flags.bits().into(),
        command: piece.command.into(),
        cookie: cookie.into(),
        offset: piece.offset.into(),
        len: piece.len.into(),
    }
}
