//! Tests of the NBD client with Freestone's server, broken servers, and servers that restart.

// `#[test]` passes if a tool is missing, except in continuous integration.
#[macro_use]
extern crate freestone_testkit;

mod conformance;
mod fake;
mod harness;
mod hostile;
mod losses;
mod order;
mod tls;
