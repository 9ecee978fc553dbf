//! Requests, replies and properties that are common to all kinds of exports. Commands and errors
//! have the numbers of the NBD protocol.

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;

pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 2;

pub const EPERM: u32 = 1;
pub const EIO: u32 = 5;
pub const ENOMEM: u32 = 12;
pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const ESHUTDOWN: u32 = 108;
pub const EOPNOTSUPP: u32 = 95;

#[derive(Debug)]
pub enum ConnectionError {
    /// The server ended the connection, or is not running.
    Ended(String),
    /// The server refused the export, with this error number and text.
    Refused(u32, String),
    /// The server violated the protocol; the string describes how.
    Protocol(String),
}

impl From<std::io::Error> for ConnectionError {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::InvalidData => Self::Protocol(error.to_string()),
            _ => Self::Ended(error.to_string()),
        }
    }
}

#[derive(Debug)]
pub struct Reply {
    pub cookie: u64,
    /// Error number of the NBD protocol, or 0 for success.
    pub error: u32,
    /// Bytes of a successful read; empty for other requests.
    pub data: Vec<u8>,
    /// Extents of a block status request: the length in bytes, and true if the extent reads as
    /// zeroes.
    pub extents: Vec<(u32, bool)>,
}

/// Properties of an export, as the client found them.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "independent properties")]
pub struct Properties {
    /// Size in bytes when the client connected.
    pub size: u64,
    pub writable: bool,
    pub zeroes: bool,
    pub trims: bool,
    /// Block status requests are supported.
    pub contexts: bool,
    pub fua: bool,
    /// The export has no volatile cache: all completed writes are durable.
    pub write_through: bool,
    /// The export reports most errors as EIO.
    pub is_coarse: bool,
    /// Requests reach the server unchecked: no block layer rejects invalid ones before.
    pub is_raw: bool,
    /// Maximum number of requests in flight that the client may have.
    pub depth: usize,
}

impl Default for Properties {
    /// Returns the properties of an NBD export without any flag.
    fn default() -> Self {
        Self {
            size: 0,
            writable: false,
            zeroes: false,
            trims: false,
            contexts: false,
            fua: true,
            write_through: false,
            is_coarse: false,
            is_raw: true,
            depth: usize::MAX,
        }
    }
}
