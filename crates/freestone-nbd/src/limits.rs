//! Limits on the resources that clients use, and grace times.

use std::time::Duration;

use freestone_core::budget;
use freestone_core::device::Geometry;

use crate::proto::MAX_PAYLOAD_BYTES;

/// Time that [`Server::close`](crate::Server::close), a forced
/// [`Server::unpublish`](crate::Server::unpublish) and dropping a server wait for requests in flight before
/// they cut the connections.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Largest and default value of [`Limits::max_handshake_bytes`].
pub const MAX_HANDSHAKE_BYTES: usize = 64 << 10;
/// Smallest value of [`Limits::max_handshake_bytes`]: room for a client's certificate and one record of
/// plaintext.
pub const MIN_HANDSHAKE_BYTES: usize = 4 << 10;

/// Maximum number of request parts in flight on one connection. At this limit the connection waits.
pub const MAX_IN_FLIGHT: usize = 256;
/// Maximum total size in bytes of the buffers of submitted parts and of large replies not yet sent. A single
/// request may use all of this limit.
pub const MAX_IN_FLIGHT_BYTES: usize = 32 << 20;

/// Limits on the resources that clients use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of connections, over all addresses. A further connection is closed as soon as it is
    /// accepted. Each connection may use one thread and
    /// [`CONNECTION_MEMORY_BYTES`](crate::CONNECTION_MEMORY_BYTES).
    pub max_connections: usize,
    /// Maximum number of connections that have not chosen an export, at least one. At the limit the server
    /// accepts no connection until a pending handshake ends. The oldest one is closed to make room when its
    /// age reaches `handshake_grace`.
    pub max_pending_handshakes: usize,
    /// Maximum number of connections accepted per second, at least one, after a burst of 64. Further
    /// connections wait in the queue of the listening socket, as each handshake takes CPU time from existing
    /// connections.
    pub max_connect_rate: u32,
    /// Age below which a pending handshake is not closed to make room for a new connection.
    pub handshake_grace: Duration,
    /// Memory budget of all connections for requests in flight, in bytes. A request that exceeds the budget
    /// waits. Values below [`budget::MIN_BYTES`](freestone_core::budget::MIN_BYTES) are raised to it.
    pub max_memory_in_flight: u64,
    /// Longest time without data from the client during a handshake.
    pub handshake_idle_timeout: Duration,
    /// Longest duration of a handshake, after which the connection is closed.
    pub handshake_timeout: Duration,
    /// Maximum number of bytes that a client may send before TLS if TLS is required, and in its TLS
    /// handshake. Values outside [`MIN_HANDSHAKE_BYTES`] to [`MAX_HANDSHAKE_BYTES`] are clamped.
    pub max_handshake_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            max_pending_handshakes: 128,
            max_connect_rate: 2000,
            handshake_grace: Duration::from_secs(3),
            max_memory_in_flight: budget::DEFAULT_BYTES,
            handshake_idle_timeout: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(60),
            max_handshake_bytes: MAX_HANDSHAKE_BYTES,
        }
    }
}

impl Limits {
    /// Returns `max_handshake_bytes`, clamped to its range.
    pub(crate) fn clamped_handshake_bytes(&self) -> usize {
        self.max_handshake_bytes.clamp(MIN_HANDSHAKE_BYTES, MAX_HANDSHAKE_BYTES)
    }
}

/// Returns the largest payload of a write in bytes. A write to a zoned device is executed as a whole, so all
/// of it must fit in [`MAX_IN_FLIGHT_BYTES`].
pub fn max_payload(geometry: &Geometry) -> u32 {
    if geometry.zones.is_none() { MAX_PAYLOAD_BYTES } else { MAX_IN_FLIGHT_BYTES as u32 }
}
