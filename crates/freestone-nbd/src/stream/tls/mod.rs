//! TLS of a server, with rustls and the cryptography of ring.
//!
//! rustls does the handshake and derives the keys. Afterwards the connection's thread processes records
//! itself with rustls' ciphers. Records are decrypted in the receive buffer, and several replies share one
//! record. Each byte is copied once in each direction, and a large receive or send is one system call.
//! rustls' own buffers would receive 4 KiB at a time.
//!
//! Session tickets are disabled, so every client is checked against the current certificate authority.

pub mod keys;
pub mod names;
pub mod opener;
pub mod sealer;
pub mod settings;
pub mod start;
#[cfg(test)]
mod tests;

/// Longest plaintext of a record, in bytes.
pub const RECORD_BYTES: usize = 16 << 10;
/// Length of a record header, in bytes.
pub const RECORD_HEADER_BYTES: usize = 5;
/// Largest difference in bytes between an encrypted record and its plaintext.
pub const RECORD_OVERHEAD_BYTES: usize = 256;
