//! The device over servers: our own, broken ones, ones that come and go.

mod conformance;
mod fake;
mod harness;
mod hostile;
mod losses;
mod order;
mod tls;
