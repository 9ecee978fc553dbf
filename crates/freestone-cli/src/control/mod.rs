//! The control socket: JSON-RPC 2.0, one message a line.

pub mod caller;
pub mod client;
mod connections;
pub mod protocol;
pub mod server;
pub mod socket;
