//! The device over servers: our own, broken ones, ones that come and go.

// `#[test]` passes if a program is missing and this is not continuous integration.
#[macro_use]
extern crate freestone_testkit;

mod conformance;
mod fake;
mod harness;
mod hostile;
mod losses;
mod order;
mod tls;
