//! Requests, replies and properties that are common to all kinds of exports. Commands and errors
//! have the numbers of the NBD protocol.

pub use freestone_testkit::nbd::wire::*;

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
