//! The ways to send requests to a server: an export in this process, fio, and clients of our own.
//!
//! A client is the same for Freestone and for its peers, so that a comparison shows the servers.

pub mod export;
pub mod fio_nbd;
pub mod nbd_client;
pub mod tls_client;
pub mod virtio;
