//! Exports: who may connect and how fast, TLS, mounts, and exports other than NBD.

mod allow_lists;
mod handshake_limits;
mod limited;
mod mount;
mod mounting;
mod shutdown;
mod tls;
mod ublk;
mod vhost_user;
