//! What clients say and hear over every export: the commands and errors have NBD's numbers.

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

/// Why a connection is of no more use.
#[derive(Debug)]
pub enum Broken {
    /// The server ended it, or is not there.
    Ended(String),
    /// The server will not give this export: the option's error and its text.
    Refused(u32, String),
    /// What came is not the protocol.
    Wrong(String),
}

impl From<std::io::Error> for Broken {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::InvalidData => Self::Wrong(error.to_string()),
            _ => Self::Ended(error.to_string()),
        }
    }
}

/// The answer to one request.
#[derive(Debug)]
pub struct Reply {
    pub cookie: u64,
    /// 0, or a number of the protocol.
    pub error: u32,
    /// What was read.
    pub data: Vec<u8>,
    /// Of a block status: length, and whether it reads as zeroes.
    pub extents: Vec<(u32, bool)>,
}

/// What an export offers.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "any of them go together")]
pub struct Offers {
    /// Bytes, when the client connected.
    pub size: u64,
    pub writable: bool,
    pub zeroes: bool,
    pub trims: bool,
    /// Block status is answered.
    pub contexts: bool,
    /// A write can be asked to last.
    pub fua: bool,
    /// All writes last.
    pub write_through: bool,
    /// Most errors are told as EIO.
    pub is_coarse: bool,
    /// What no block layer lets pass can be sent.
    pub is_raw: bool,
    /// Most requests at once.
    pub depth: usize,
}

impl Default for Offers {
    /// Those of an NBD export without any flag.
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
