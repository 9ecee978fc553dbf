//! Requests, replies and properties common to all kinds of exports. Commands and errors have NBD's
//! numbers.

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

/// Reasons why a connection is unusable.
#[derive(Debug)]
pub enum ConnectionError {
    /// The server ended the connection, or is not running.
    Ended(String),
    /// The server refused the export: error of the option, and its text.
    Refused(u32, String),
    /// The server violated the protocol.
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

/// The reply to one request.
#[derive(Debug)]
pub struct Reply {
    pub cookie: u64,
    /// Error: 0, or a number of the protocol.
    pub error: u32,
    /// Data of a read.
    pub data: Vec<u8>,
    /// Extents of a block status: length, and true if the extent reads as zeroes.
    pub extents: Vec<(u32, bool)>,
}

/// Properties of an export.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "independent properties")]
pub struct Properties {
    /// Size in bytes when the client connected.
    pub size: u64,
    pub writable: bool,
    pub zeroes: bool,
    pub trims: bool,
    /// Block status is supported.
    pub contexts: bool,
    /// Writes with FUA are supported.
    pub fua: bool,
    /// All writes are durable.
    pub write_through: bool,
    /// Most errors are reported as EIO.
    pub is_coarse: bool,
    /// Requests reach the server without a block layer that checks them.
    pub is_raw: bool,
    /// Maximum number of requests in flight.
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
