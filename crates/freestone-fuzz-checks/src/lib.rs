//! What must hold for any bytes that come from outside, one module for each door they come through.
//!
//! The targets in `fuzz/` feed these checks with what libFuzzer finds; the tests of this crate run
//! them over the corpora in `fuzz/corpus/` and over mutations of these. A check panics where
//! something does not hold. It returns whether the input was taken or refused, so that a test can
//! see that both ways were gone.

pub mod corpus;
pub mod nbd;
pub mod nbd_client;
pub mod power_log;
pub mod qcow2;
pub mod rpc;
pub mod saved;
pub mod scratch;
pub mod state;
pub mod store;
pub mod vhost_user;
pub mod words;
pub mod zones;
