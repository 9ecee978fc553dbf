//! Protocol values of a connection: the layout of headers, error numbers, and metadata contexts.
//!
//! The handshake negotiates layout and contexts, and the session encodes replies with them. The values have no
//! state.

pub mod contexts;
pub mod errno;
pub mod headers;
