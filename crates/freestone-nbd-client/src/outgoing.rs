//! What a connection sends: headers and small data in one buffer, large data out of the requests.

use std::io::IoSlice;

use freestone_core::sync::Instant;
use freestone_nbd_proto::{CommandFlags, REQUEST_MAGIC, RequestHeader, command};
use zerocopy::IntoBytes as _;

use crate::error::LinkError;
use crate::job::{Job, Piece};
use crate::link::Link;
use crate::table::Table;

/// Data up to this size is copied behind its header, in bytes.
const COPY_MAX_BYTES: usize = 16 << 10;
/// When so much is ready it is sent first, in bytes.
const FULL_BYTES: usize = 64 << 10;

/// What is ready to be sent.
#[derive(Default)]
pub struct Outgoing {
    bytes: Vec<u8>,
    /// How much of these has left.
    left: usize,
    /// Data behind these, and how much of that has left.
    data: Option<(u64, usize)>,
}

impl Outgoing {
    /// Whether there is room for another request.
    pub fn has_room(&self) -> bool {
        self.data.is_none() && self.bytes.len() < FULL_BYTES
    }

    /// Whether nothing is to be sent.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.data.is_none()
    }

    /// Adds a request; there is room.
    pub fn put(&mut self, table: &mut Table, job: Box<Job>, piece: Piece) {
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

    /// The last word to a server that is left: nothing is answered any more.
    pub fn goodbye(link: &mut Link) {
        let piece = Piece { command: command::DISC, flags: CommandFlags::empty(), offset: 0, len: 0, at: 0 };
        // A server that does not hear it sees that the connection ends.
        let _ = link.send(&[IoSlice::new(header(&piece, 0).as_bytes())]);
    }

    /// Sends as much as goes. True: something has left.
    ///
    /// # Errors
    /// The connection is lost.
    pub fn send(&mut self, link: &mut Link, table: &mut Table) -> Result<bool, LinkError> {
        let mut moved = false;
        loop {
            let bytes = &self.bytes[self.left..];
            let sent = match self.data {
                None if bytes.is_empty() && !link.has_unsent() => return Ok(moved),
                None => link.send(&[IoSlice::new(bytes)])?,
                Some((cookie, from)) => {
                    let Some(sent) = table.get(cookie) else { return Err(UNASKED) };
                    let data = &sent.job.buffer[sent.piece.payload()][from..];
                    link.send(&[IoSlice::new(bytes), IoSlice::new(data)])?
                }
            };
            if sent == 0 {
                return Ok(moved);
            }
            moved = true;
            let of_bytes = sent.min(bytes.len());
            self.left += of_bytes;
            if self.left == self.bytes.len() {
                self.bytes.clear();
                self.left = 0;
            }
            if let Some((cookie, from)) = &mut self.data {
                *from += sent - of_bytes;
                let Some(sent) = table.get(*cookie) else { return Err(UNASKED) };
                sent.since = Instant::now();
                if *from == sent.piece.payload().len() {
                    self.data = None;
                }
            }
        }
    }
}

const UNASKED: LinkError = LinkError::Protocol("it answered a write before it had its data");

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
