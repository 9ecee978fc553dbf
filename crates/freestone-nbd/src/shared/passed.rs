//! Listening sockets and connections in their transmission phase that a server passes to its successor.

use std::borrow::Cow;
use std::io;
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::address::Address;

/// A connection in its transmission phase, without its socket. No request is in flight: each request that had
/// begun was answered. Metadata contexts and headers keep the names that the handshake negotiated.
///
/// The successor may be another version of the program, so unknown fields are ignored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionState {
    /// The [`Address`] at which the connection was accepted, as text.
    pub address: String,
    /// The name of the export.
    pub export: String,
    /// The negotiated headers: `simple`, `structured` or `extended`.
    pub headers: String,
    /// The names of the selected metadata contexts, such as `base:allocation`.
    pub contexts: Vec<String>,
    /// Received bytes of requests that have not begun. At most
    /// [`RECEIVE_BUFFER_BYTES`](crate::RECEIVE_BUFFER_BYTES).
    pub unread: Vec<u8>,
}

/// A connection that a server passes to its successor.
#[derive(Debug)]
pub struct PassedConnection {
    /// The socket, which closes on exec.
    pub socket: OwnedFd,
    /// The state of the connection.
    pub state: ConnectionState,
}

/// Sockets and connections that a server passes to its successor, from
/// [`Server::pass_on`](crate::Server::pass_on).
#[derive(Debug, Default)]
pub struct Passed {
    /// The addresses with their listening sockets, in the order in which the server started to listen. The
    /// sockets close on exec. [`Address::Stdin`] is omitted. Sockets from
    /// [`Server::adopt_socket`](crate::Server::adopt_socket) are included.
    pub listeners: Vec<(Address, Vec<OwnedFd>)>,
    /// The connections.
    pub connections: Vec<PassedConnection>,
}

/// Why [`Server::adopt_connection`](crate::Server::adopt_connection) failed.
#[derive(Debug, Error)]
pub enum AdoptError {
    /// The state of the connection is invalid, or from a version with more features.
    #[error("a connection to `{export}` at {address} has an invalid state: {reason}")]
    State {
        /// The name of the export.
        export: String,
        /// The address, as text.
        address: String,
        /// The invalid part.
        reason: String,
    },
    /// The export or the server does not accept the connection.
    #[error("a connection to `{export}` at {address} is refused: {reason}")]
    Refused {
        /// The name of the export.
        export: String,
        /// The address.
        address: Address,
        /// The reason.
        reason: Cow<'static, str>,
    },
    /// No memory, file descriptor or thread is left for the connection.
    #[error("no resources for a connection to `{export}` at {address}: {source}")]
    Resources {
        /// The name of the export.
        export: String,
        /// The address.
        address: Address,
        /// The system's reason.
        source: io::Error,
    },
}
