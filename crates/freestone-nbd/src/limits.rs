//! What clients may use up, and how long the end of something waits for them.

use std::time::Duration;

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
    /// A handshake in which the client is silent for so long is ended.
    pub handshake_silence: Duration,
    /// A handshake that takes longer is ended.
    pub handshake_total: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            handshake_silence: Duration::from_secs(10),
            handshake_total: Duration::from_secs(60),
        }
    }
}
