//! An NBD client in plain bytes, independent of the code under test. Tests, benchmarks, the torture program and the
//! fuzz checks use it.
//!
//! * [`wire`]: constants, and the bytes of options and requests.
//! * [`handshake`]: the client's side of the handshake on any stream.
//! * [`Reply`]: replies to requests.
//! * [`Client`]: a client that sends requests and waits for their replies. [`prelude`] has all that its users need.
//!
//! This room uses nothing but the standard library. All its items may be used from outside.

mod client;
pub mod handshake;
mod replies;
pub mod wire;

use std::io::{Error, ErrorKind};

pub use client::Client;
pub use handshake::{OptionReply, export_info};
pub use replies::{CHUNK_BYTES_MAX, Chunk, Reply};

/// Names for tests of a server: the client, and the constants of the protocol.
pub mod prelude {
    pub use super::wire::*;
    pub use super::{Chunk, Client, export_info};
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

fn u16_at(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

fn u32_at(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[..8].try_into().expect("eight bytes"))
}
