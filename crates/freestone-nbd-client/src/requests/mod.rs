//! Requests in progress: their commands, the table of commands in flight, and the parts of replies received.
//!
//! The shared state owns a waiting request, and a connection owns a request in flight. This module performs no
//! I/O and takes no lock.

pub mod job;
mod ranges;
pub mod status;
pub mod table;
