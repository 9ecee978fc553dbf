//! Checks of parsers and servers with arbitrary input: one module for each interface that receives bytes from
//! outside the process.
//!
//! The targets in `fuzz/` run these checks with inputs of libFuzzer. The tests of this crate run them over
//! the corpora in `fuzz/corpus/` and over mutations of these inputs. A check panics if a property does not
//! hold. A check returns true if the input was accepted and false if it was refused, so a test can require
//! that both happen. Most checks compare the code with a reference parser: a simple, independent
//! implementation of the format.

#![allow(missing_docs, reason = "checks: only what a name does not say has a comment")]

pub mod corpus;
mod device;
pub mod lz4_pages;
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
