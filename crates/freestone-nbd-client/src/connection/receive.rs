//! Parser for server replies. Every field is validated: cookies must be in flight, data must lie in
//! the requested range, and memory use is bounded.

use freestone_core::sync::Instant;
use freestone_nbd_proto::{
    Chunk, DataChunk, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, SimpleReply, chunk, command, errno,
};
use zerocopy::FromBytes as _;

use crate::error::LinkError;
use crate::link::Link;
use crate::link::handshake::text;
use crate::requests::status::{DESCRIPTOR_BYTES, MAX_DESCRIPTORS, parse};
use crate::requests::table::{CommandTable, SentPiece};

/// Size of the input buffer in bytes.
const INPUT_BYTES: usize = 64 << 10;
/// If at least this many bytes of read data are missing, they are received directly into the
/// request's buffer.
const DIRECT_BYTES: usize = 4096;
/// Number of received bytes at which a call returns, so that the thread can send too.
const TURN_BYTES: usize = 4 << 20;
/// Longest error chunk in bytes: errno, length, text, offset.
const MAX_ERROR_BYTES: usize = 4 + 2 + u16::MAX as usize + 8;
/// Longest block status chunk in bytes.
const MAX_STATUS_BYTES: usize = 4 + MAX_DESCRIPTORS * DESCRIPTOR_BYTES;
/// Payload of a hole chunk in bytes: offset and length.
const HOLE_BYTES: usize = 12;

/// A command whose reply is complete.
pub struct PieceReply {
    pub sent: SentPiece,
    /// The NBD errno in the reply, or 0 without an error.
    pub errno: u32,
}

/// Parser state: meaning of the next byte.
#[derive(Clone, Copy)]
enum State {
    Header,
    /// Data of a read, at byte `at` of the request's buffer.
    Data {
        cookie: u64,
        at: usize,
        left: usize,
        last: bool,
    },
    /// Payload of a chunk, parsed when it is complete.
    Payload {
        cookie: u64,
        kind: u16,
        len: usize,
        last: bool,
    },
}

/// Receiving side of a connection.
pub struct Receiver {
    input: Box<[u8]>,
    /// Unparsed range of `input`.
    start: usize,
    end: usize,
    payload: Vec<u8>,
    state: State,
    structured: bool,
    context: Option<u32>,
    /// Commands whose replies are complete.
    pub replies: Vec<PieceReply>,
}

impl Receiver {
    pub fn new(structured: bool, context: Option<u32>) -> Self {
        Self {
            input: vec![0; INPUT_BYTES].into(),
            start: 0,
            end: 0,
            payload: Vec::new(),
            state: State::Header,
            structured,
            context,
            replies: Vec::new(),
        }
    }

    /// Receives and parses available data. Returns true if more may be available.
    ///
    /// # Errors
    /// The connection is lost, or the server violated the protocol.
    pub fn receive(&mut self, link: &mut Link, table: &mut CommandTable) -> Result<bool, LinkError> {
        let mut turn = 0;
        while turn < TURN_BYTES {
            let (got, wanted) = if let State::Data { cookie, at, left, .. } = self.state
                && left >= DIRECT_BYTES
                && self.start == self.end
            {
                let buffer = table.buffer(cookie).ok_or(UNKNOWN)?;
                let got = link.recv(&mut buffer[at..at + left])?;
                if let Some(n) = got {
                    self.add_received(n);
                }
                (got, left)
            } else {
                self.input.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
                let room = &mut self.input[self.end..];
                let wanted = room.len();
                let got = link.recv(room)?;
                self.end += got.unwrap_or(0);
                (got, wanted)
            };
            match got {
                None => return Ok(false),
                Some(0) => return Err(LinkError::Closed),
                Some(n) => {
                    self.parse_input(table)?;
                    turn += n;
                    if n < wanted && !link.has_unread() {
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }

    /// Advances the data position by `n` bytes.
    fn add_received(&mut self, n: usize) {
        if let State::Data { at, left, .. } = &mut self.state {
            *at += n;
            *left -= n;
        }
    }

    fn data(&self) -> &[u8] {
        &self.input[self.start..self.end]
    }

    /// Parses the input buffer as far as possible.
    fn parse_input(&mut self, table: &mut CommandTable) -> Result<(), LinkError> {
        loop {
            match self.state {
                State::Header => {
                    if !self.parse_header(table)? {
                        return Ok(());
                    }
                }
                State::Data { cookie, left: 0, last, .. } => {
                    table.get(cookie).ok_or(UNKNOWN)?.last_progress = Instant::now();
                    self.state = State::Header;
                    if last {
                        self.finish_reply(table, cookie)?;
                    }
                }
                State::Data { cookie, at, left, .. } => {
                    let n = left.min(self.end - self.start);
                    if n == 0 {
                        return Ok(());
                    }
                    let buffer = table.buffer(cookie).ok_or(UNKNOWN)?;
                    buffer[at..at + n].copy_from_slice(&self.input[self.start..self.start + n]);
                    self.start += n;
                    self.add_received(n);
                }
                State::Payload { cookie, kind, len, last } => {
                    let n = (len - self.payload.len()).min(self.end - self.start);
                    self.payload.extend_from_slice(&self.input[self.start..self.start + n]);
                    self.start += n;
                    if self.payload.len() < len {
                        return Ok(());
                    }
                    self.state = State::Header;
                    self.parse_payload(table, cookie, kind)?;
                    self.payload = Vec::new();
                    if last {
                        self.finish_reply(table, cookie)?;
                    }
                }
            }
        }
    }

    /// Parses a header. Returns false if it is incomplete.
    fn parse_header(&mut self, table: &mut CommandTable) -> Result<bool, LinkError> {
        let Some(magic) = self.data().first_chunk::<4>() else { return Ok(false) };
        match u32::from_be_bytes(*magic) {
            SIMPLE_REPLY_MAGIC => {
                let Ok((reply, _)) = SimpleReply::read_from_prefix(self.data()) else { return Ok(false) };
                self.start += size_of::<SimpleReply>();
                self.parse_simple_reply(table, reply)?;
                Ok(true)
            }
            STRUCTURED_REPLY_MAGIC if self.structured => {
                let Ok((header, rest)) = Chunk::read_from_prefix(self.data()) else { return Ok(false) };
                let fixed = match header.kind.get() {
                    chunk::OFFSET_DATA => 8,
                    chunk::OFFSET_HOLE => HOLE_BYTES,
                    _ => 0,
                };
                if rest.len() < fixed.min(header.len.get() as usize) {
                    return Ok(false);
                }
                self.parse_chunk(table, header)?;
                Ok(true)
            }
            _ => Err(LinkError::Protocol("a reply has the wrong magic number")),
        }
    }

    fn parse_simple_reply(&mut self, table: &mut CommandTable, reply: SimpleReply) -> Result<(), LinkError> {
        let cookie = reply.cookie.get();
        let sent = table.get(cookie).ok_or(UNKNOWN)?;
        let command = sent.piece.command;
        if self.structured && matches!(command, command::READ | command::BLOCK_STATUS) {
            return Err(LinkError::Protocol(
                "it sent a simple reply to a command that needs a structured reply",
            ));
        }
        match (reply.error.get(), command) {
            (0, command::READ) => {
                let (at, left) = (sent.piece.at, sent.piece.len as usize);
                sent.received.add(0, sent.piece.len).map_err(LinkError::Protocol)?;
                self.state = State::Data { cookie, at, left, last: true };
                Ok(())
            }
            (0, _) => self.finish_reply(table, cookie),
            (errno, _) => {
                sent.error = Some(errno);
                self.finish_reply(table, cookie)
            }
        }
    }

    fn parse_chunk(&mut self, table: &mut CommandTable, header: Chunk) -> Result<(), LinkError> {
        let (cookie, kind, len) = (header.cookie.get(), header.kind.get(), header.len.get() as usize);
        let sent = table.get(cookie).ok_or(UNKNOWN)?;
        sent.last_progress = Instant::now();
        let last = header.flags.get() & chunk::FLAG_DONE != 0;
        let piece = sent.piece;
        let place = |offset: u64, len: u32| {
            let at = offset.checked_sub(piece.offset).filter(|at| *at < u64::from(piece.len));
            let at = at.ok_or(OUTSIDE)? as u32;
            if len == 0 || len > piece.len - at { Err(OUTSIDE) } else { Ok(at) }
        };
        let payload = match kind {
            chunk::NONE if len == 0 && last => {
                self.start += size_of::<Chunk>();
                return self.finish_reply(table, cookie);
            }
            chunk::OFFSET_DATA if piece.command == command::READ => {
                let Ok((data, _)) = DataChunk::read_from_prefix(self.data()) else { return Err(LENGTH) };
                let bytes = u32::try_from(len.checked_sub(8).ok_or(LENGTH)?).map_err(|_| LENGTH)?;
                let at = place(data.offset.get(), bytes)?;
                sent.received.add(at, at + bytes).map_err(LinkError::Protocol)?;
                self.start += size_of::<DataChunk>();
                let at = piece.at + at as usize;
                self.state = State::Data { cookie, at, left: bytes as usize, last };
                return Ok(());
            }
            chunk::OFFSET_HOLE if piece.command == command::READ => {
                if len != HOLE_BYTES {
                    return Err(LENGTH);
                }
                let fields = &self.data()[size_of::<Chunk>()..];
                let (offset, fields) = fields.split_first_chunk::<8>().ok_or(LENGTH)?;
                let bytes = u32::from_be_bytes(*fields.first_chunk::<4>().ok_or(LENGTH)?);
                let at = place(u64::from_be_bytes(*offset), bytes)?;
                sent.received.add(at, at + bytes).map_err(LinkError::Protocol)?;
                let from = piece.at + at as usize;
                sent.job.buffer[from..from + bytes as usize].fill(0);
                self.start += size_of::<Chunk>() + HOLE_BYTES;
                if last {
                    self.finish_reply(table, cookie)?;
                }
                return Ok(());
            }
            chunk::BLOCK_STATUS if piece.command == command::BLOCK_STATUS => MAX_STATUS_BYTES,
            kind if kind & chunk::ERRORS != 0 => MAX_ERROR_BYTES,
            _ => return Err(LinkError::Protocol("a chunk does not match the command")),
        };
        if len > payload {
            return Err(LinkError::Protocol("a chunk is longer than it can be"));
        }
        self.start += size_of::<Chunk>();
        self.payload = Vec::with_capacity(len);
        self.state = State::Payload { cookie, kind, len, last };
        Ok(())
    }

    fn parse_payload(&mut self, table: &mut CommandTable, cookie: u64, kind: u16) -> Result<(), LinkError> {
        let sent = table.get(cookie).ok_or(UNKNOWN)?;
        if kind == chunk::BLOCK_STATUS {
            if !sent.job.status.is_empty() {
                return Err(LinkError::Protocol("it sent block status twice"));
            }
            sent.job.status =
                parse(&self.payload, self.context, sent.piece.len).map_err(LinkError::Protocol)?;
            return Ok(());
        }
        let (errno, rest) = self.payload.split_first_chunk::<4>().ok_or(LENGTH)?;
        let errno = u32::from_be_bytes(*errno);
        if errno == 0 {
            return Err(LinkError::Protocol("an error chunk has errno 0"));
        }
        if matches!(kind, chunk::ERROR | chunk::ERROR_OFFSET) {
            let (len, rest) = rest.split_first_chunk::<2>().ok_or(LENGTH)?;
            let place = if kind == chunk::ERROR_OFFSET { 8 } else { 0 };
            let len = usize::from(u16::from_be_bytes(*len));
            if rest.len() != len + place {
                return Err(LENGTH);
            }
            tracing::debug!(errno, text = text(&rest[..len]), "the server returned an error");
        }
        sent.error.get_or_insert(errno);
        Ok(())
    }

    fn finish_reply(&mut self, table: &mut CommandTable, cookie: u64) -> Result<(), LinkError> {
        let sent = table.take(cookie).ok_or(UNKNOWN)?;
        let errno = sent.error.unwrap_or(0);
        if errno == errno::SHUTDOWN {
            self.replies.push(PieceReply { sent, errno });
            return Err(LinkError::ShuttingDown);
        }
        if errno == 0 {
            if sent.piece.command == command::READ && !sent.received.is_complete(sent.piece.len) {
                return Err(self.reject_reply(sent, "the chunks of a reply do not cover the request"));
            }
            if sent.piece.command == command::BLOCK_STATUS && sent.job.status.is_empty() {
                return Err(self.reject_reply(sent, "it replied to a block status query without descriptors"));
            }
        }
        self.replies.push(PieceReply { sent, errno });
        Ok(())
    }

    /// Treats a reply as not received, so that the request is sent again, and returns the error.
    fn reject_reply(&mut self, sent: SentPiece, what: &'static str) -> LinkError {
        self.replies.push(PieceReply { sent, errno: errno::SHUTDOWN });
        LinkError::Protocol(what)
    }
}

const UNKNOWN: LinkError = LinkError::Protocol("it replied to an unknown or completed command");
const OUTSIDE: LinkError = LinkError::Protocol("a chunk lies outside the requested range");
const LENGTH: LinkError = LinkError::Protocol("a chunk has the wrong length");
