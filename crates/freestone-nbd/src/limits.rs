//! What clients may use up, and how long the end of something waits for them.

use std::time::Duration;

use freestone_core::budget;

/// How long [`Server::close`](crate::Server::close), a forced
/// [`Server::unpublish`](crate::Server::unpublish) and dropping a server wait for requests in
/// flight.
pub const END_GRACE: Duration = Duration::from_secs(5);

/// Most that is received of a client that has to come by TLS and has not yet, in bytes.
pub const MAX_CLEAR_BYTES: usize = 64 << 10;
/// Where there are [`Limits::max_newcomers`], one that has not chosen an export for so long makes room.
pub const NEWCOMER_GRACE: Duration = Duration::from_secs(3);

/// What clients may use up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once, over all addresses. One more is closed as soon as it is accepted. Each
    /// may hold [`CONNECTION_MEMORY_BYTES`](crate::CONNECTION_MEMORY_BYTES) and one thread.
    pub max_connections: usize,
    /// Connections at once that have not chosen an export, at least one. Further ones wait, not
    /// accepted, until one of them has, or the oldest was there for [`NEWCOMER_GRACE`] and is closed.
    pub max_newcomers: usize,
    /// Connections that are accepted a second, at least one, after a burst of 64. Further ones wait, not
    /// accepted: what they cost is time of those that are connected.
    pub connects_per_second: u32,
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
            max_newcomers: 128,
            connects_per_second: 2000,
            max_memory_in_flight: budget::DEFAULT_BYTES,
            handshake_silence: Duration::from_secs(10),
            handshake_total: Duration::from_secs(60),
        }
    }
}
