//! Tests of the NBD server over sockets, with a client that encodes each byte itself.
#![allow(missing_docs, reason = "test code")]

mod common;
mod connections;
mod requests;
mod successor;
mod tls;
