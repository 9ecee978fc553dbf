//! Constants and message layouts of the NBD protocol (fixed newstyle), shared by server and client. All
//! integers are big-endian.
//!
//! Names are those of `doc/proto.md` of the `NetworkBlockDevice` project without the `NBD_` prefix.

mod messages;
mod uri;

pub use messages::{
    Chunk, DataChunk, Descriptor, ErrorPayload, ExportNameReply, ExtendedChunk, ExtendedDataChunk,
    ExtendedDescriptor, ExtendedRequest, ExtendedStatus, Greeting, HolePayload, InfoBlockSize, InfoExport,
    OptionHeader, OptionReply, RequestHeader, SimpleReply,
};
pub use uri::UriAddress;

use bitflags::bitflags;

/// First magic number from the server ("NBDMAGIC").
pub const INIT_MAGIC: u64 = 0x4e42444d41474943;
/// Second magic number from the server, and the first of each option ("IHAVEOPT").
pub const OPTION_MAGIC: u64 = 0x49484156454F5054;
/// Magic number at the start of each option reply.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Magic number at the start of each request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Magic number at the start of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Magic number at the start of a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Magic number at the start of a request with an extended header.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Magic number at the start of a reply chunk with an extended header.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Maximum length of a string (name, description, message) in bytes.
pub const MAX_STRING_BYTES: usize = 4096;
/// Maximum payload of a request or reply chunk that the server offers, in bytes.
pub const MAX_PAYLOAD_BYTES: u32 = 64 << 20;
/// Number of zero bytes after the reply to `OPT_EXPORT_NAME`, unless the client declined them.
pub const EXPORT_NAME_PADDING_BYTES: usize = 124;
/// Metadata context of holes and zeroes.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// Context id of [`BASE_ALLOCATION`].
pub const BASE_ALLOCATION_ID: u32 = 1;
/// Metadata context of the changes of a fork or snapshot. Only exports of such devices offer this context.
pub const FREESTONE_CHANGED: &str = "freestone:changed";
/// Context id of [`FREESTONE_CHANGED`].
pub const FREESTONE_CHANGED_ID: u32 = 2;

bitflags! {
    /// Flags of the server's greeting. The client replies with the flags that it accepts, in 32 bits.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct HandshakeFlags: u16 {
        /// Fixed newstyle handshake: each option gets a reply.
        const FIXED_NEWSTYLE = 1;
        /// No padding after the reply to `OPT_EXPORT_NAME`.
        const NO_ZEROES = 2;
    }

    /// Capabilities of an export.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct TransmissionFlags: u16 {
        /// Always set, because the flags are valid.
        const HAS_FLAGS = 1;
        /// The export rejects writes.
        const READ_ONLY = 1 << 1;
        /// `CMD_FLUSH` is supported.
        const SEND_FLUSH = 1 << 2;
        /// `CMD_FLAG_FUA` is supported.
        const SEND_FUA = 1 << 3;
        /// Near accesses are faster than distant ones.
        const ROTATIONAL = 1 << 4;
        /// `CMD_TRIM` is supported.
        const SEND_TRIM = 1 << 5;
        /// `CMD_WRITE_ZEROES` is supported.
        const SEND_WRITE_ZEROES = 1 << 6;
        /// `CMD_FLAG_DF` is supported.
        const SEND_DF = 1 << 7;
        /// A flush on one connection covers all connections.
        const CAN_MULTI_CONN = 1 << 8;
        /// `CMD_CACHE` is supported.
        const SEND_CACHE = 1 << 10;
        /// `CMD_FLAG_FAST_ZERO` is supported.
        const SEND_FAST_ZERO = 1 << 11;
        /// `CMD_FLAG_PAYLOAD_LEN` is supported with `CMD_BLOCK_STATUS`.
        const BLOCK_STATUS_PAYLOAD = 1 << 12;
    }

    /// Flags of a request.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct CommandFlags: u16 {
        /// The request is durable at its completion.
        const FUA = 1;
        /// Write zeroes: do not free the storage of the range.
        const NO_HOLE = 1 << 1;
        /// Read: reply with one data chunk.
        const DF = 1 << 2;
        /// Block status: reply with one extent.
        const REQ_ONE = 1 << 3;
        /// Write zeroes: fail if this is not faster than writing the zeroes as data.
        const FAST_ZERO = 1 << 4;
        /// With extended headers: the length is that of a payload, which follows the header.
        const PAYLOAD_LEN = 1 << 5;
    }

    /// Flags of an extent in the context `base:allocation`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct StateFlags: u32 {
        /// The extent occupies no space.
        const HOLE = 1;
        /// The extent reads as zeroes.
        const ZERO = 2;
    }

    /// Flags of an extent in the context `freestone:changed`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ChangedFlags: u32 {
        /// The fork or snapshot stores the extent itself instead of reading it from its base or origin.
        const OWN = 1;
    }
}

/// Options of the handshake.
pub mod option {
    /// Select an export and start transmission. Has no error reply.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Switch to TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and start transmission.
    pub const GO: u32 = 7;
    /// Enable structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Select metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Enable extended headers.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of option replies.
pub mod reply {
    /// The option is complete.
    pub const ACK: u32 = 1;
    /// Name and description of an export, in a list.
    pub const SERVER: u32 = 2;
    /// Information about an export.
    pub const INFO: u32 = 3;
    /// Id and name of a metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The option is unknown.
    pub const ERR_UNSUP: u32 = (1 << 31) + 1;
    /// The server's policy forbids the option.
    pub const ERR_POLICY: u32 = (1 << 31) + 2;
    /// The data of the option is invalid.
    pub const ERR_INVALID: u32 = (1 << 31) + 3;
    /// The option requires TLS.
    pub const ERR_TLS_REQD: u32 = (1 << 31) + 5;
    /// The export does not exist.
    pub const ERR_UNKNOWN: u32 = (1 << 31) + 6;
    /// The server is shutting down.
    pub const ERR_SHUTDOWN: u32 = (1 << 31) + 7;
    /// The client must request block sizes first.
    pub const ERR_BLOCK_SIZE_REQD: u32 = (1 << 31) + 8;
    /// The data of the option is too long.
    pub const ERR_TOO_BIG: u32 = (1 << 31) + 9;
    /// Extended headers are in use or required.
    pub const ERR_EXT_HEADER_REQD: u32 = (1 << 31) + 10;
}

/// Types of information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Canonical name of the export.
    pub const NAME: u16 = 1;
    /// Description of the export for users.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum, preferred and maximum block size.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Commands of the transmission phase.
pub mod command {
    /// Read data.
    pub const READ: u16 = 0;
    /// Write data. With compact headers, the only command with a payload.
    pub const WRITE: u16 = 1;
    /// Disconnect. Has no reply.
    pub const DISC: u16 = 2;
    /// Make completed writes durable.
    pub const FLUSH: u16 = 3;
    /// Discard a range.
    pub const TRIM: u16 = 4;
    /// Prefetch a range.
    pub const CACHE: u16 = 5;
    /// Write zeroes to a range.
    pub const WRITE_ZEROES: u16 = 6;
    /// Report the extents of a range.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Types of structured reply chunks.
pub mod chunk {
    /// No payload; ends a reply.
    pub const NONE: u16 = 0;
    /// Data of a read.
    pub const OFFSET_DATA: u16 = 1;
    /// A range of a read that contains only zeroes.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents in one metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents in one metadata context, with extended headers.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Bit set in the types of error chunks.
    pub const ERRORS: u16 = 1 << 15;
    /// The request failed.
    pub const ERROR: u16 = ERRORS + 1;
    /// The request failed at an offset of the export.
    pub const ERROR_OFFSET: u16 = ERRORS + 2;
    /// Flag of the last chunk of a reply.
    pub const FLAG_DONE: u16 = 1;
}

/// Error numbers that the protocol allows.
pub mod errno {
    /// Operation not permitted.
    pub const PERM: u32 = 1;
    /// Input/output error.
    pub const IO: u32 = 5;
    /// Cannot allocate memory.
    pub const NOMEM: u32 = 12;
    /// Invalid argument.
    pub const INVAL: u32 = 22;
    /// No space left on device.
    pub const NOSPC: u32 = 28;
    /// Value too large.
    pub const OVERFLOW: u32 = 75;
    /// Operation not supported.
    pub const NOTSUP: u32 = 95;
    /// The server is shutting down.
    pub const SHUTDOWN: u32 = 108;
}
