//! The control socket: JSON-RPC 2.0, one message a line.

pub mod client;
pub mod protocol;
pub mod server;
pub mod socket;
