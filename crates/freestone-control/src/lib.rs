//! Sockets through which a server is controlled and observed: the control socket (JSON-RPC 2.0, one message per line) and
//! HTTP for metrics and pages. Connections, bytes and time are limited.
//!
//! `socket` owns the path of a control socket, `server` the threads of its connections, and `http` those of HTTP. A
//! [`Handler`](server::Handler) answers calls, a [`Site`](http::Site) requests. The crate knows no device: the verbs and
//! sites are in `freestone-server`. It is a part of the program `freestone`, and changes without notice.

pub mod caller;
mod connections;
pub mod http;
pub mod protocol;
pub mod server;
pub mod socket;
