//! What clients may use up, and how long the end of something waits for them.

use std::time::Duration;

use freestone_core::budget;

/// How long [`Server::close`](crate::Server::close), a forced
/// [`Server::unpublish`](crate::Server::unpublish) and dropping a server wait for requests in
/// flight.
pub const END_GRACE: Duration = Duration::from_secs(5);

/// What [`Limits::handshake_bytes`] is at most, and unless said.
pub const MAX_HANDSHAKE_BYTES: usize = 64 << 10;
/// The least it can be: room for a client's certificate, and a record of what comes in clear.
pub const MIN_HANDSHAKE_BYTES: usize = 4 << 10;

/// What clients may use up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once, over all addresses. One more is closed as soon as it is accepted. Each
    /// may hold [`CONNECTION_MEMORY_BYTES`](crate::CONNECTION_MEMORY_BYTES) and one thread.
    pub max_connections: usize,
    /// Connections at once that have not chosen an export, at least one. Further ones wait, not
    /// accepted, until one of them has, or the oldest was there for `newcomer_grace` and is closed.
    pub max_newcomers: usize,
    /// Connections that are accepted a second, at least one, after a burst of 64. Further ones wait, not
    /// accepted: what they cost is time of those that are connected.
    pub connects_per_second: u32,
    /// So long one of these is left alone, whoever waits.
    pub newcomer_grace: Duration,
    /// Bytes that all connections together may hold for requests that are not answered; a request
    /// that finds none waits. At least [`budget::MIN_BYTES`](freestone_core::budget::MIN_BYTES).
    pub max_memory_in_flight: u64,
    /// A handshake in which the client is silent for so long is ended.
    pub handshake_silence: Duration,
    /// A handshake that takes longer is ended.
    pub handshake_total: Duration,
    /// Bytes that a client which has to come by TLS may send in clear, and of a client's handshake of
    /// TLS; [`MIN_HANDSHAKE_BYTES`] to [`MAX_HANDSHAKE_BYTES`], what is beyond is taken for these.
    pub handshake_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            max_newcomers: 128,
            connects_per_second: 2000,
            newcomer_grace: Duration::from_secs(3),
            max_memory_in_flight: budget::DEFAULT_BYTES,
            handshake_silence: Duration::from_secs(10),
            handshake_total: Duration::from_secs(60),
            handshake_bytes: MAX_HANDSHAKE_BYTES,
        }
    }
}

impl Limits {
    /// `handshake_bytes` within what is possible.
    pub(crate) fn most_handshake_bytes(&self) -> usize {
        self.handshake_bytes.clamp(MIN_HANDSHAKE_BYTES, MAX_HANDSHAKE_BYTES)
    }
}
