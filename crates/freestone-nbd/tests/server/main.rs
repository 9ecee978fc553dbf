//! Tests of the NBD server over sockets, with a client that encodes each byte itself.
#![allow(missing_docs, reason = "test code")]

mod allowed;
mod budget;
mod bytes;
mod common;
mod contexts;
mod extended;
mod garbage;
mod handshake;
mod holes;
mod listening;
mod places;
mod sweeps;
mod templates;
mod tls;
mod transmission;
mod waiting;
mod workers;
