//! An NBD server for Freestone's devices, after the protocol's specification (`doc/proto.md` of the
//! `NetworkBlockDevice` project): fixed newstyle handshake, structured replies, extended headers,
//! `base:allocation` and a context of what a fork or snapshot holds itself, many exports, exports that make a device
//! for each connection.
//!
//! A [`Server`] listens at any number of [`Address`]es, and a client sees what was published at the
//! address to which it connected. Each connection has a thread of its own, which tries every
//! request inline, submits what would block, and hands large ones to [`Workers`] where that is worth
//! it; replies that are ready together leave in one system call. What clients can make the server
//! hold is bounded: [`Limits`], [`CONNECTION_MEMORY_BYTES`].
//!
//! With [`Server::secure`] clients come by TLS.
//!
//! Not offered: resizing, oldstyle.

mod acceptor;
mod address;
mod arrivals;
mod buffers;
mod connection;
mod contexts;
mod errno;
mod export;
mod flight;
mod hand_on;
mod handshake;
mod headers;
mod input;
mod large;
mod limits;
mod link;
mod listen;
mod newcomers;
mod pace;
mod receive;
mod replies;
mod reply;
mod request;
mod secure;
mod server;
mod session;
mod shared;
mod spares;
mod stall;
mod stats;
mod status;
mod stream;
mod sweep;
mod sweeps;
mod tables;
mod template;
mod tls;
mod upgrade;

use freestone_nbd_proto as proto;

pub use address::{Address, AddressError};
pub use export::{Clients, ExportInfo, ExportOptions, TemplateOptions};
pub use flight::{MAX_IN_FLIGHT, MAX_IN_FLIGHT_BYTES};
pub use freestone_core::allow::{AllowList, Denials, MAX_ALLOWED, NetworkError, Who};
pub use freestone_core::unix_socket::Access;
pub use freestone_core::workers::Workers;
pub use handshake::{MAX_OPTION_BYTES, MAX_SKIPPED_OPTION_BYTES};
pub use input::RECEIVE_BUFFER_BYTES;
pub use limits::{END_GRACE, Limits, MAX_HANDSHAKE_BYTES, MIN_HANDSHAKE_BYTES};
pub use listen::{ListenError, MAX_SOCKET_PATH_BYTES};
pub use proto::{MAX_PAYLOAD_BYTES, MAX_STRING_BYTES};
pub use replies::REPLY_BUFFER_BYTES;
pub use server::Server;
pub use session::CONNECTION_MEMORY_BYTES;
pub use stats::Stats;
pub use status::MAX_DESCRIPTORS;
pub use sweeps::{MAX_SWEEPS, STEP_BYTES};
pub use tables::PublishError;
pub use template::{Fresh, Make};
pub use tls::settings::{Credentials, TlsError, TlsFiles, TlsMode};
