//! How requests and replies look on a connection, as it was agreed on in the handshake.

use freestone_core::zeroes::are_zeroes;

use crate::proto::{
    Chunk, DataChunk, ExtendedChunk, ExtendedDataChunk, ExtendedRequest, HolePayload, RequestHeader,
    SIMPLE_REPLY_MAGIC, SimpleReply, chunk,
};
use crate::replies::Replies;

/// Data of fewer bytes goes as it is: the message that it is zeroes would hardly be shorter.
const HOLE_MIN_BYTES: usize = 512;

/// Headers of requests and replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Headers {
    /// Compact ones; each reply is one piece.
    Simple,
    /// Compact ones; replies with data, and errors, come in chunks.
    Structured,
    /// Extended ones; all replies come in chunks.
    Extended,
}

/// What a reply repeats of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// Chosen by the client.
    pub cookie: u64,
    /// First byte; only extended headers have it.
    pub offset: u64,
}

impl Headers {
    /// Whether replies have chunks.
    #[inline]
    pub const fn have_chunks(self) -> bool {
        !matches!(self, Self::Simple)
    }

    /// Length of a request's header in bytes.
    pub const fn request_bytes(self) -> usize {
        match self {
            Self::Simple | Self::Structured => size_of::<RequestHeader>(),
            Self::Extended => size_of::<ExtendedRequest>(),
        }
    }

    /// Length of a chunk's header in bytes.
    pub const fn chunk_bytes(self) -> usize {
        match self {
            Self::Simple | Self::Structured => size_of::<Chunk>(),
            Self::Extended => size_of::<ExtendedChunk>(),
        }
    }

    /// Length of what stands before data, in bytes.
    pub const fn data_head_bytes(self) -> usize {
        match self {
            Self::Simple => size_of::<SimpleReply>(),
            Self::Structured => size_of::<DataChunk>(),
            Self::Extended => size_of::<ExtendedDataChunk>(),
        }
    }

    /// Length in bytes of a chunk that tells of zeroes.
    pub const fn hole_bytes(self) -> usize {
        self.chunk_bytes() + size_of::<HolePayload>()
    }

    /// Whether this data, which was read for one chunk, is told as a hole. Who has data pays a look
    /// at both of its ends; a scan of zeroes costs less than it takes to send them.
    pub fn is_hole(self, data: &[u8]) -> bool {
        self.have_chunks() && data.len() >= HOLE_MIN_BYTES && are_zeroes(data)
    }

    /// Appends a chunk of `len` bytes of data, which lie in the replies behind the place of its head; or
    /// of a hole, where they are zeroes. Apart, as replies without chunks are to be short.
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

    /// Appends a chunk that says that `len` bytes from `offset` on are zeroes.
    pub fn put_hole(self, replies: &mut Replies, tag: Tag, offset: u64, len: u32, done: bool) {
        let payload = HolePayload { offset: offset.into(), len: len.into() };
        self.put_chunk(replies, tag, chunk::OFFSET_HOLE, done, size_of::<HolePayload>() as u32);
        replies.put(&payload);
    }

    /// Appends a chunk's header, for a payload of `len` bytes.
    pub fn put_chunk(self, replies: &mut Replies, tag: Tag, kind: u16, done: bool, len: u32) {
        match self {
            Self::Simple | Self::Structured => replies.put(&Chunk::new(tag.cookie, kind, done, len)),
            Self::Extended => replies.put(&ExtendedChunk::new(tag.cookie, tag.offset, kind, done, len)),
        }
    }

    /// Appends what stands before `len` bytes of data from `offset` on, for which there is room. With
    /// `done` they are the last of their reply.
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

/// The header of a simple reply.
pub fn simple(cookie: u64, error: u32) -> SimpleReply {
    SimpleReply { magic: SIMPLE_REPLY_MAGIC.into(), error: error.into(), cookie: cookie.into() }
}
