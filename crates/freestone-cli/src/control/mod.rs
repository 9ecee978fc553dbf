//! The control socket: JSON-RPC 2.0, one message per line.

pub mod caller;
pub mod client;
mod connections;
pub mod protocol;
pub mod server;
pub mod socket;
