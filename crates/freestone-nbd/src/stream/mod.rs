//! The byte stream of one connection: buffers, receive and send system calls, with or without TLS.
//!
//! A connection's thread owns one [`Input`](input::Input) and one [`Replies`](replies::Replies). The handshake
//! creates both and passes them to the session. This module does not depend on options or requests.

pub mod buffers;
pub mod input;
pub mod receive;
pub mod replies;
pub mod tls;
