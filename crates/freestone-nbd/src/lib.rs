//! An NBD server for Freestone's devices, following `doc/proto.md` of the `NetworkBlockDevice` project. It
//! has the fixed newstyle handshake, structured replies, extended headers, many exports, and templates
//! (exports that create a device for each connection). Metadata contexts are `base:allocation`, and one for
//! the content that a fork or snapshot holds itself.
//!
//! A [`Server`] listens at any number of [`Address`]es. A client sees the exports published at the address to
//! which it connected. Each connection has its own thread. That thread tries every request inline, submits
//! requests that would block, and hands large ones to [`Workers`] if that is faster. Replies that are ready
//! together are sent in one system call. [`Limits`] and [`CONNECTION_MEMORY_BYTES`] bound the resources that
//! clients can use.
//!
//! [`Server::enable_tls`] enables TLS.
//!
//! A server can pass its listening sockets and its connections to a successor, for example to a newer version
//! of the program in the same process ([`Server::pass_on`], [`Server::adopt_connection`]). Clients notice a
//! pause only.
//!
//! The protocol code is part of this crate, because no existing Rust crate supported structured replies. A
//! connection that is idle for a second returns the memory of its buffers to the kernel.
//!
//! Not implemented: resizing and the oldstyle handshake.

mod accept;
mod address;
mod connection;
mod connection_threads;
mod handshake;
mod limits;
mod link;
mod server;
mod session;
mod shared;
mod stats;
mod stream;
mod successor;
mod wire;

use freestone_nbd_proto as proto;

pub use accept::listen::{ListenError, MAX_SOCKET_PATH_BYTES};
pub use address::{Address, AddressError};
pub use freestone_core::allow::{AllowEntry, AllowList, Denials, MAX_ALLOWED, NetworkError};
pub use freestone_core::unix_socket::Access;
pub use freestone_core::workers::Workers;
pub use handshake::{MAX_OPTION_BYTES, MAX_SKIPPED_OPTION_BYTES};
pub use limits::{
    Limits, MAX_HANDSHAKE_BYTES, MAX_IN_FLIGHT, MAX_IN_FLIGHT_BYTES, MIN_HANDSHAKE_BYTES, SHUTDOWN_GRACE,
};
pub use proto::{MAX_PAYLOAD_BYTES, MAX_STRING_BYTES};
pub use server::Server;
pub use session::CONNECTION_MEMORY_BYTES;
pub use session::requests::status::MAX_DESCRIPTORS;
pub use session::requests::sweeps::{MAX_SWEEPS, SWEEP_STEP_BYTES};
pub use shared::export::{Client, ExportInfo, ExportOptions, TemplateOptions, Visibility};
pub use shared::passed::{AdoptError, ConnectionState, Passed, PassedConnection};
pub use shared::tables::PublishError;
pub use shared::template::{ConnectionDevice, DeviceFactory};
pub use stats::Stats;
pub use stream::input::RECEIVE_BUFFER_BYTES;
pub use stream::replies::REPLY_BUFFER_BYTES;
pub use stream::tls::settings::{Credentials, TlsError, TlsFiles, TlsMode};
