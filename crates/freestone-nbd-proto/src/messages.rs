//! Layouts of the messages, in the order in which they are sent.

use zerocopy::byteorder::network_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

#[cfg(doc)]
use crate::{
    BASE_ALLOCATION_ID, ChangedFlags, CommandFlags, EXTENDED_REQUEST_MAGIC, FREESTONE_CHANGED_ID,
    HandshakeFlags, INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC,
    StateFlags, TransmissionFlags, command, errno, info, option, reply,
};
use crate::{EXTENDED_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk};

/// The server's greeting.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Greeting {
    /// Magic number, [`INIT_MAGIC`].
    pub init: U64,
    /// Magic number, [`OPTION_MAGIC`].
    pub magic: U64,
    /// Bits of [`HandshakeFlags`].
    pub flags: U16,
}

/// Header of an option, followed by its data.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct OptionHeader {
    /// Magic number, [`OPTION_MAGIC`].
    pub magic: U64,
    /// The option, a constant of [`option`].
    pub option: U32,
    /// Length of the data in bytes.
    pub len: U32,
}

/// Header of an option reply, followed by its data.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct OptionReply {
    /// Magic number, [`OPTION_REPLY_MAGIC`].
    pub magic: U64,
    /// The option to which the server replies, a constant of [`option`].
    pub option: U32,
    /// Type of the reply, a constant of [`reply`].
    pub kind: U32,
    /// Length of the data in bytes.
    pub len: U32,
}

/// Reply to `OPT_EXPORT_NAME`, followed by the padding.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExportNameReply {
    /// Size of the export in bytes.
    pub size: U64,
    /// Bits of [`TransmissionFlags`].
    pub flags: U16,
}

/// Data of an `INFO_EXPORT` reply.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct InfoExport {
    /// Type of the information, [`info::EXPORT`].
    pub kind: U16,
    /// Size of the export in bytes.
    pub size: U64,
    /// Bits of [`TransmissionFlags`].
    pub flags: U16,
}

/// Data of an `INFO_BLOCK_SIZE` reply.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct InfoBlockSize {
    /// Type of the information, [`info::BLOCK_SIZE`].
    pub kind: U16,
    /// Required alignment of offsets and lengths in bytes.
    pub minimum: U32,
    /// Smallest efficient request in bytes.
    pub preferred: U32,
    /// Largest payload in bytes.
    pub maximum: U32,
}

/// Header of a request, followed by its payload.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RequestHeader {
    /// Magic number, [`REQUEST_MAGIC`].
    pub magic: U32,
    /// Bits of [`CommandFlags`].
    pub flags: U16,
    /// The command, a constant of [`command`].
    pub command: U16,
    /// Identifier chosen by the client and copied to the reply.
    pub cookie: U64,
    /// Offset of the range on the export in bytes.
    pub offset: U64,
    /// Length of the range in bytes.
    pub len: U32,
}

/// Extended header of a request, followed by its payload.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExtendedRequest {
    /// Magic number, [`EXTENDED_REQUEST_MAGIC`].
    pub magic: U32,
    /// Bits of [`CommandFlags`].
    pub flags: U16,
    /// The command, a constant of [`command`].
    pub command: U16,
    /// Identifier chosen by the client and copied to the reply.
    pub cookie: U64,
    /// Offset of the range on the export in bytes, copied to the reply.
    pub offset: U64,
    /// Length in bytes: of the payload with [`CommandFlags::PAYLOAD_LEN`], otherwise of the range.
    pub len: U64,
}

/// Simple reply, followed by its data.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SimpleReply {
    /// Magic number, [`SIMPLE_REPLY_MAGIC`].
    pub magic: U32,
    /// Error number: 0 or a constant of [`errno`].
    pub error: U32,
    /// The request's cookie.
    pub cookie: U64,
}

/// Header of a structured reply chunk, followed by its payload.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Chunk {
    /// Magic number, [`STRUCTURED_REPLY_MAGIC`].
    pub magic: U32,
    /// [`chunk::FLAG_DONE`] for the last chunk of a reply, else 0.
    pub flags: U16,
    /// Type of the chunk, a constant of [`chunk`].
    pub kind: U16,
    /// The request's cookie.
    pub cookie: U64,
    /// Length of the payload in bytes.
    pub len: U32,
}

/// Extended header of a reply chunk, followed by its payload.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExtendedChunk {
    /// Magic number, [`EXTENDED_REPLY_MAGIC`].
    pub magic: U32,
    /// [`chunk::FLAG_DONE`] for the last chunk of a reply, else 0.
    pub flags: U16,
    /// Type of the chunk, a constant of [`chunk`].
    pub kind: U16,
    /// The request's cookie.
    pub cookie: U64,
    /// The request's offset.
    pub offset: U64,
    /// Length of the payload in bytes.
    pub len: U64,
}

/// Header of a data chunk, followed by the data.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DataChunk {
    /// Header. The length in it is that of the data plus 8, for the offset.
    pub chunk: Chunk,
    /// Offset of the data on the export in bytes.
    pub offset: U64,
}

/// Extended header of a data chunk, followed by the data.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExtendedDataChunk {
    /// Header. The length in it is that of the data plus 8, for the offset.
    pub chunk: ExtendedChunk,
    /// Offset of the data on the export in bytes.
    pub offset: U64,
}

/// Payload of a chunk of zeroes.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct HolePayload {
    /// Offset of the zeroes on the export in bytes.
    pub offset: U64,
    /// Number of zeroes in bytes.
    pub len: U32,
}

/// Payload of an error chunk, followed by the message.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ErrorPayload {
    /// Error number, a constant of [`errno`].
    pub error: U32,
    /// Length of the message in bytes.
    pub message_len: U16,
}

/// Payload of a block status chunk with an extended header, followed by the descriptors. With a compact
/// header the payload begins with the context only.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExtendedStatus {
    /// Context id, [`BASE_ALLOCATION_ID`] or [`FREESTONE_CHANGED_ID`].
    pub context: U32,
    /// Number of descriptors.
    pub count: U32,
}

/// A descriptor of a block status chunk.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Descriptor {
    /// Length of the extent in bytes.
    pub len: U32,
    /// Bits of [`StateFlags`] or [`ChangedFlags`], depending on the context.
    pub flags: U32,
}

/// A descriptor of a block status chunk with an extended header.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExtendedDescriptor {
    /// Length of the extent in bytes.
    pub len: U64,
    /// Bits of [`StateFlags`] or [`ChangedFlags`], depending on the context.
    pub flags: U64,
}

const _: () = {
    assert!(size_of::<Greeting>() == 18);
    assert!(size_of::<OptionHeader>() == 16);
    assert!(size_of::<OptionReply>() == 20);
    assert!(size_of::<ExportNameReply>() == 10);
    assert!(size_of::<InfoExport>() == 12);
    assert!(size_of::<InfoBlockSize>() == 14);
    assert!(size_of::<RequestHeader>() == 28);
    assert!(size_of::<SimpleReply>() == 16);
    assert!(size_of::<Chunk>() == 20);
    assert!(size_of::<DataChunk>() == 28);
    assert!(size_of::<HolePayload>() == 12);
    assert!(size_of::<ErrorPayload>() == 6);
    assert!(size_of::<Descriptor>() == 8);
    assert!(size_of::<ExtendedRequest>() == 32);
    assert!(size_of::<ExtendedChunk>() == 32);
    assert!(size_of::<ExtendedDataChunk>() == 40);
    assert!(size_of::<ExtendedStatus>() == 8);
    assert!(size_of::<ExtendedDescriptor>() == 16);
};

impl Chunk {
    /// Returns the header of a chunk of type `kind` with `len` bytes of payload. `done` marks the last chunk
    /// of a reply.
    pub fn new(cookie: u64, kind: u16, done: bool, len: u32) -> Self {
        Self {
            magic: STRUCTURED_REPLY_MAGIC.into(),
            flags: if done { chunk::FLAG_DONE } else { 0 }.into(),
            kind: kind.into(),
            cookie: cookie.into(),
            len: len.into(),
        }
    }
}

impl ExtendedChunk {
    /// Returns the header of a chunk of type `kind` with `len` bytes of payload, for the request with this
    /// cookie and offset. `done` marks the last chunk of a reply.
    pub fn new(cookie: u64, offset: u64, kind: u16, done: bool, len: u32) -> Self {
        Self {
            magic: EXTENDED_REPLY_MAGIC.into(),
            flags: if done { chunk::FLAG_DONE } else { 0 }.into(),
            kind: kind.into(),
            cookie: cookie.into(),
            offset: offset.into(),
            len: u64::from(len).into(),
        }
    }
}
