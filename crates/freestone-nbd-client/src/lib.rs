//! NBD client: exports of NBD servers as devices.
//!
//! [`Nbd`] supports the fixed newstyle handshake, structured replies, `base:allocation` and TLS
//! with any server that follows the protocol specification (`doc/proto.md` of the
//! `NetworkBlockDevice` project). It uses several connections if the server guarantees that they
//! see the same data. All requests are submitted; `try_io` never performs I/O, as it would wait for
//! the network.
//!
//! **Lost connections.** The client reconnects with growing pauses as long as the device exists. It
//! resends reads and writes that have no reply yet. A request that finds no server for
//! [`Config::timeout`] fails with [`Error::Media`](freestone_core::device::Error::Media). A server
//! crash may lose writes that completed without a flush: the flushes in flight that cover them
//! fail; otherwise the next flush fails once.
//!
//! A resent write may run twice, through the old and the new connection. The protocol would allow a
//! server to run a request long after its connection closed, and so to overwrite newer data with
//! old. Real servers do not: when a connection closes, they finish or drop the requests of that
//! connection.
//!
//! **Trust.** Only the content of a server is trusted. The client validates every reply and bounds
//! the memory used for replies.

mod config;
mod connection;
mod device;
mod error;
mod link;
mod requests;
mod shared;
mod uri;

pub use config::{
    Config, DEFAULT_CONNECTIONS, DEFAULT_TIMEOUT, MAX_CONNECTIONS, MAX_TIMEOUT, MIN_TIMEOUT, TlsFiles,
};
pub use device::Nbd;
pub use error::{LinkError, SetupError};
pub use uri::{DEFAULT_PORT, ServerAddress, Uri, UriError};
