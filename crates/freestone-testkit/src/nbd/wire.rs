//! Constants of the NBD protocol, and the encoding of what a client sends.

/// Client flags: fixed newstyle handshake, and no padding after the reply to [`EXPORT_NAME`].
pub const CLIENT_FLAGS: u32 = 3;
pub const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Options.
pub const EXPORT_NAME: u32 = 1;
pub const ABORT: u32 = 2;
pub const LIST: u32 = 3;
pub const STARTTLS: u32 = 5;
pub const OPT_INFO: u32 = 6;
pub const GO: u32 = 7;
pub const STRUCTURED_REPLY: u32 = 8;
pub const LIST_META_CONTEXT: u32 = 9;
pub const SET_META_CONTEXT: u32 = 10;
pub const EXTENDED_HEADERS: u32 = 11;

/// Types of replies to options.
pub const ACK: u32 = 1;
pub const SERVER: u32 = 2;
pub const INFO: u32 = 3;
pub const META_CONTEXT: u32 = 4;
pub const ERR_UNSUP: u32 = 0x8000_0001;
pub const ERR_POLICY: u32 = 0x8000_0002;
pub const ERR_INVALID: u32 = 0x8000_0003;
pub const ERR_TLS_REQD: u32 = 0x8000_0005;
pub const ERR_UNKNOWN: u32 = 0x8000_0006;
pub const ERR_SHUTDOWN: u32 = 0x8000_0007;
pub const ERR_TOO_BIG: u32 = 0x8000_0009;
pub const ERR_EXT_HEADER_REQD: u32 = 0x8000_000a;

/// Transmission flags of an export.
pub const READ_ONLY: u16 = 1 << 1;
pub const SEND_TRIM: u16 = 1 << 5;
pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
pub const SEND_DF: u16 = 1 << 7;
pub const MULTI_CONN: u16 = 1 << 8;
pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;

/// Requests.
pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;

/// Flags of requests.
pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 2;
pub const DF: u16 = 4;
pub const REQ_ONE: u16 = 8;
pub const FAST_ZERO: u16 = 16;
pub const PAYLOAD_LEN: u16 = 32;

/// Error numbers.
pub const EPERM: u32 = 1;
pub const EIO: u32 = 5;
pub const ENOMEM: u32 = 12;
pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const EOVERFLOW: u32 = 75;
pub const ENOTSUP: u32 = 95;
pub const ESHUTDOWN: u32 = 108;

pub const REQUEST_MAGIC: u32 = 0x2560_9513;
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;
pub const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

/// The type of request and reply headers that a client negotiates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Headers {
    Simple,
    Structured,
    Extended,
}

impl Headers {
    pub const ALL: [Self; 3] = [Self::Simple, Self::Structured, Self::Extended];

    /// Returns the option that negotiates the headers.
    pub fn option(self) -> Option<u32> {
        match self {
            Self::Simple => None,
            Self::Structured => Some(STRUCTURED_REPLY),
            Self::Extended => Some(EXTENDED_HEADERS),
        }
    }

    /// Returns the length of a request header in bytes.
    pub const fn request_bytes(self) -> usize {
        if matches!(self, Self::Extended) { 32 } else { 28 }
    }

    /// Encodes a request header.
    pub fn request(self, flags: u16, command: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
        if self == Self::Extended {
            return long_request(flags, command, cookie, offset, len);
        }
        request(flags, command, cookie, offset, u32::try_from(len).expect("a length of 32 bits"))
    }
}

impl From<bool> for Headers {
    fn from(structured: bool) -> Self {
        if structured { Self::Structured } else { Self::Simple }
    }
}

/// Encodes an option with its data.
pub fn option(kind: u32, data: &[u8]) -> Vec<u8> {
    [&OPTION_MAGIC[..], &kind.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
}

/// Encodes the data of [`OPT_INFO`] and [`GO`]. `wanted` has the types of the requested information.
pub fn info_data(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = string(name);
    data.extend((wanted.len() as u16).to_be_bytes());
    data.extend(wanted.iter().flat_map(|kind| kind.to_be_bytes()));
    data
}

/// Encodes the data of [`LIST_META_CONTEXT`] and [`SET_META_CONTEXT`].
pub fn context_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(name);
    data.extend((queries.len() as u32).to_be_bytes());
    data.extend(queries.iter().flat_map(|query| string(query)));
    data
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

/// Encodes a compact request header, without an allocation.
#[inline]
pub fn request_header(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> [u8; 28] {
    let mut bytes = [0; 28];
    bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&command.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// Encodes a compact request header.
pub fn request(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    request_header(flags, command, cookie, offset, len).to_vec()
}

/// Encodes an extended request header.
pub fn long_request(flags: u16, command: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = request(flags, command, cookie, offset, 0);
    bytes[..4].copy_from_slice(&EXTENDED_REQUEST_MAGIC.to_be_bytes());
    bytes.truncate(24);
    bytes.extend(len.to_be_bytes());
    bytes
}
