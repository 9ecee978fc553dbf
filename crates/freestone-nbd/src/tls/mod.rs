//! TLS of a server: rustls, with the cryptography of ring.
//!
//! rustls shakes hands and derives keys. What comes after that is done record by record in the
//! connection's own thread, with rustls' ciphers: a record is decrypted where it was received, and
//! several replies leave in one. So each byte is copied once on either way, and a large receive or
//! send is one system call, where rustls' own buffers take 4 KiB at a time.
//!
//! Nobody is known again by a ticket: who connects is checked against the authority of now.

pub mod keys;
pub mod names;
pub mod opener;
pub mod sealer;
pub mod settings;
pub mod start;
#[cfg(test)]
mod tests;

/// Longest data of one record in bytes.
pub const RECORD_BYTES: usize = 16 << 10;
/// What stands before each record.
pub const RECORD_HEADER_BYTES: usize = 5;
/// Most by which a cipher makes a record longer.
pub const RECORD_OVERHEAD_BYTES: usize = 256;
