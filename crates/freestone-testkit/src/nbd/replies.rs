//! Replies to requests: simple replies, chunks of structured replies, and chunks with extended headers.

use std::io::{Read, Result};

use super::wire::{CHUNK_MAGIC, EXTENDED_CHUNK_MAGIC, SIMPLE_REPLY_MAGIC};
use super::{invalid, u16_at, u32_at, u64_at};

/// Largest payload of a chunk, in bytes. A larger one violates the protocol.
pub const CHUNK_BYTES_MAX: usize = 33 << 20;
const SIMPLE_REPLY_BYTES: usize = 16;

/// A simple reply, or a chunk of a structured reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chunk {
    /// A simple reply. The data of a successful read follows, which is not part of the value.
    Simple {
        cookie: u64,
        error: u32,
    },
    None {
        cookie: u64,
    },
    Data {
        cookie: u64,
        done: bool,
        offset: u64,
        data: Vec<u8>,
    },
    Hole {
        cookie: u64,
        done: bool,
        offset: u64,
        len: u32,
    },
    /// Block status of one context: the length in bytes and the flags of each extent.
    Status {
        cookie: u64,
        done: bool,
        context: u32,
        extents: Vec<(u64, u64)>,
    },
    Error {
        cookie: u64,
        error: u32,
        text: String,
    },
}

impl Chunk {
    pub fn cookie(&self) -> u64 {
        match self {
            Self::Simple { cookie, .. }
            | Self::None { cookie }
            | Self::Data { cookie, .. }
            | Self::Hole { cookie, .. }
            | Self::Status { cookie, .. }
            | Self::Error { cookie, .. } => *cookie,
        }
    }

    /// Returns true if the reply ends with the chunk.
    pub fn ends(&self) -> bool {
        !matches!(
            self,
            Self::Data { done: false, .. }
                | Self::Hole { done: false, .. }
                | Self::Status { done: false, .. }
        )
    }
}

/// A chunk, with the part of its header that depends on the negotiated headers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    pub chunk: Chunk,
    /// Offset of the request in an extended header; None with another header.
    pub offset: Option<u64>,
}

impl Reply {
    /// Receives a reply, and no byte more.
    pub fn receive(stream: &mut impl Read) -> Result<Self> {
        let mut bytes = Vec::new();
        loop {
            if let Some((reply, _)) = Self::parse(&bytes)? {
                return Ok(reply);
            }
            let received = bytes.len();
            bytes.resize(wanted_bytes(&bytes)?, 0);
            stream.read_exact(&mut bytes[received..])?;
        }
    }

    /// Parses the reply with which `bytes` begin. Returns the reply and its length in bytes, or None if the end of the
    /// reply is missing.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>> {
        let len = wanted_bytes(bytes)?;
        let Some(bytes) = bytes.get(..len) else { return Ok(None) };
        let (chunk, offset) = match u32_at(bytes) {
            SIMPLE_REPLY_MAGIC => {
                (Some(Chunk::Simple { error: u32_at(&bytes[4..]), cookie: u64_at(&bytes[8..]) }), None)
            }
            CHUNK_MAGIC => (parse_chunk(bytes, 20, false), None),
            _ => (parse_chunk(bytes, 32, true), Some(u64_at(&bytes[16..]))),
        };
        match chunk {
            Some(chunk) => Ok(Some((Self { chunk, offset }, len))),
            None => Err(invalid(format!("a chunk of {len} bytes: {:x?}", &bytes[..20]))),
        }
    }
}

/// Returns the length of the reply with which `bytes` begin, or of its header if that is incomplete.
fn wanted_bytes(bytes: &[u8]) -> Result<usize> {
    if bytes.len() < SIMPLE_REPLY_BYTES {
        return Ok(SIMPLE_REPLY_BYTES);
    }
    let (header, payload) = match u32_at(bytes) {
        SIMPLE_REPLY_MAGIC => (SIMPLE_REPLY_BYTES, 0),
        CHUNK_MAGIC => (20, bytes.get(16..20).map_or(0, u32_at).into()),
        EXTENDED_CHUNK_MAGIC => (32, bytes.get(24..32).map_or(0, u64_at)),
        magic => return Err(invalid(format!("a reply begins with {magic:#x}"))),
    };
    if payload > CHUNK_BYTES_MAX as u64 {
        return Err(invalid(format!("a chunk of {payload} bytes")));
    }
    Ok(header + payload as usize)
}

/// Parses a chunk with a header of `header` bytes. Returns None if the chunk is invalid.
fn parse_chunk(bytes: &[u8], header: usize, extended: bool) -> Option<Chunk> {
    let (flags, kind, cookie) = (u16_at(&bytes[4..]), u16_at(&bytes[6..]), u64_at(&bytes[8..]));
    let (done, body) = (flags == 1, &bytes[header..]);
    match (kind, body.len()) {
        _ if flags > 1 => None,
        (0, 0) if done => Some(Chunk::None { cookie }),
        (1, 9..) => Some(Chunk::Data { cookie, done, offset: u64_at(body), data: body[8..].to_vec() }),
        (2, 12) => Some(Chunk::Hole { cookie, done, offset: u64_at(body), len: u32_at(&body[8..]) }),
        (5, 12..) if !extended && body.len() % 8 == 4 => {
            let extents = body[4..].chunks_exact(8).map(|e| (u32_at(e).into(), u32_at(&e[4..]).into()));
            Some(Chunk::Status { cookie, done, context: u32_at(body), extents: extents.collect() })
        }
        (6, 24..) if extended && body.len() == 8 + 16 * u32_at(&body[4..]) as usize => {
            let extents = body[8..].chunks_exact(16).map(|e| (u64_at(e), u64_at(&e[8..])));
            Some(Chunk::Status { cookie, done, context: u32_at(body), extents: extents.collect() })
        }
        (0x8001, 6..) if done && body.len() == 6 + usize::from(u16_at(&body[4..])) => {
            let text = String::from_utf8(body[6..].to_vec()).ok()?;
            Some(Chunk::Error { cookie, error: u32_at(body), text })
        }
        _ => None,
    }
}
