//! New connections before they have a thread: listening sockets, the loop that accepts, and the limits on
//! connections that have not chosen an export.
//!
//! [`acceptor`] owns the listening sockets, and [`idle_threads`] the threads without a connection. The
//! server's shared state contains both. Its tables contain [`pending_handshakes`] and [`connect_rate`], and
//! their lock guards these. This module does not depend on exports, handshakes or sessions.

pub mod acceptor;
pub mod connect_rate;
pub mod idle_threads;
pub mod listen;
pub mod pending_handshakes;
