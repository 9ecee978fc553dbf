//! Settings of a server that are not settings of a device: permissions of sockets, allow lists, handshake limits, TLS,
//! HTTP addresses and paths. Each file has the command-line options of its subject, and combines them with the configuration file.
//!
//! The room owns no state except the loaded TLS files (`tls`). Every room but `config` may use it.

pub mod access;
pub mod allow;
pub mod exposure;
pub mod handshake;
pub mod http_address;
pub mod paths;
pub mod tls;
