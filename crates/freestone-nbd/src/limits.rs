//! What clients may use up, and how long the end of something waits for them.

use std::time::Duration;

use freestone_core::budget;

/// How long [`Server::close`](crate::Server::close), a forced
/// [`Server::unpublish`](crate::Server::unpublish) and dropping a server wait for requests in
/// flight.
pub const END_GRACE: Duration = Duration::from_secs(5);

/// What clients may use up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once, over all addresses. One more is closed as soon as it is accepted. Each
    /// may hold [`CONNECTION_MEMORY_BYTES`](crate::CONNECTION_MEMORY_BYTES) and one thread.
    pub max_connections: usize,
    /// Bytes that all connections together may hold for requests that are not answered; a request
    /// that finds none waits. At least [`budget::MIN_BYTES`](freestone_core::budget::MIN_BYTES).
    pub max_memory_in_flight: u64,
    /// A handshake in which the client is silent for so long is ended.
    pub handshake_silence: Duration,
    /// A handshake that takes longer is ended.
    pub handshake_total: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            max_memory_in_flight: budget::DEFAULT_BYTES,
            handshake_silence: Duration::from_secs(10),
            handshake_total: Duration::from_secs(60),
        }
    }
}
