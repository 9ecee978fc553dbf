//! The layout of requests and replies, as negotiated in the handshake.

use freestone_core::zeroes::are_zeroes;

use crate::proto::{
    Chunk, DataChunk, ExtendedChunk, ExtendedDataChunk, ExtendedRequest, HolePayload, RequestHeader,
    SIMPLE_REPLY_MAGIC, SimpleReply, chunk,
};
use crate::stream::replies::Replies;

/// Shortest run of zeroes, in bytes, that is sent as a hole. For less data a hole chunk saves hardly anything
/// over a data chunk.
const HOLE_MIN_BYTES: usize = 512;

/// Negotiated headers of requests and replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Headers {
    /// Compact headers; each reply is a simple reply in one piece.
    Simple,
    /// Compact headers; replies with data and errors are sent in chunks.
    Structured,
    /// Extended headers; all replies are sent in chunks.
    Extended,
}

/// The fields of a request that its reply repeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// Identifier chosen by the client.
    pub cookie: u64,
    /// Offset of the request in bytes; only extended headers repeat it.
    pub offset: u64,
}

impl Headers {
    const ALL: [Self; 3] = [Self::Simple, Self::Structured, Self::Extended];

    /// Returns the name for the state of a passed connection.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Simple => "simple",
            Self::Structured => "structured",
            Self::Extended => "extended",
        }
    }

    /// Returns the headers with a [`name`](Self::name).
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|headers| headers.name() == name)
    }

    #[inline]
    pub const fn have_chunks(self) -> bool {
        !matches!(self, Self::Simple)
    }

    pub const fn request_bytes(self) -> usize {
        match self {
            Self::Simple | Self::Structured => size_of::<RequestHeader>(),
            Self::Extended => size_of::<ExtendedRequest>(),
        }
    }

    pub const fn chunk_bytes(self) -> usize {
        match self {
            Self::Simple | Self::Structured => size_of::<Chunk>(),
            Self::Extended => size_of::<ExtendedChunk>(),
        }
    }

    /// Returns the length in bytes of the header before the data of a read reply.
    pub const fn data_head_bytes(self) -> usize {
        match self {
            Self::Simple => size_of::<SimpleReply>(),
            Self::Structured => size_of::<DataChunk>(),
            Self::Extended => size_of::<ExtendedDataChunk>(),
        }
    }

    pub const fn hole_bytes(self) -> usize {
        self.chunk_bytes() + size_of::<HolePayload>()
    }

    /// Returns true if `data`, the data of one chunk, is sent as a hole. For nonzero data the check usually
    /// ends at the first or last bytes. Scanning zeroes costs less than sending them.
    pub fn is_hole(self, data: &[u8]) -> bool {
        self.have_chunks() && data.len() >= HOLE_MIN_BYTES && are_zeroes(data)
    }

    /// Appends a chunk of `len` bytes of data, or a hole chunk if all bytes are zero. The data already lies
    /// in the reply buffer, behind the space for the header. Not inlined, to keep the path of simple replies
    /// short.
    #[inline(never)]
    pub fn put_chunk_of_data(self, replies: &mut Replies, tag: Tag, offset: u64, len: usize, done: bool) {
        let data = replies.position() + self.data_head_bytes();
        if self.is_hole(replies.space(data, len)) {
            self.put_hole(replies, tag, offset, len as u32, done);
        } else {
            self.put_data_head(replies, tag, offset, len as u32, done);
            replies.commit(data + len);
        }
    }

    /// Appends a hole chunk for `len` bytes at `offset`.
    pub fn put_hole(self, replies: &mut Replies, tag: Tag, offset: u64, len: u32, done: bool) {
        let payload = HolePayload { offset: offset.into(), len: len.into() };
        self.put_chunk(replies, tag, chunk::OFFSET_HOLE, done, size_of::<HolePayload>() as u32);
        replies.put(&payload);
    }

    /// Appends a chunk header for a payload of `len` bytes.
    pub fn put_chunk(self, replies: &mut Replies, tag: Tag, kind: u16, done: bool, len: u32) {
        match self {
            Self::Simple | Self::Structured => replies.put(&Chunk::new(tag.cookie, kind, done, len)),
            Self::Extended => replies.put(&ExtendedChunk::new(tag.cookie, tag.offset, kind, done, len)),
        }
    }

    /// Appends the header before `len` bytes of data at device offset `offset`. The caller has reserved the
    /// space. `done` is true for the last chunk of the reply.
    pub fn put_data_head(self, replies: &mut Replies, tag: Tag, offset: u64, len: u32, done: bool) {
        let (cookie, kind) = (tag.cookie, chunk::OFFSET_DATA);
        match self {
            Self::Simple => replies.put(&simple(cookie, 0)),
            Self::Structured => {
                let chunk = Chunk::new(cookie, kind, done, len + 8);
                replies.put(&DataChunk { chunk, offset: offset.into() });
            }
            Self::Extended => {
                let chunk = ExtendedChunk::new(cookie, tag.offset, kind, done, len + 8);
                replies.put(&ExtendedDataChunk { chunk, offset: offset.into() });
            }
        }
    }
}

pub fn simple(cookie: u64, error: u32) -> SimpleReply {
    SimpleReply { magic: SIMPLE_REPLY_MAGIC.into(), error: error.into(), cookie: cookie.into() }
}
