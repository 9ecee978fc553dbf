//! The built program as its users meet it: its command line and sockets, clients that Debian ships,
//! test drives, and what stalls.

// `#[test]` passes if a program is missing and this is not continuous integration.
#[macro_use]
extern crate freestone_testkit;

mod cli;
mod clients;
mod docs;
mod drives;
mod harness;
mod limits;
mod restarts;
mod stalls;
mod storage;
mod terminal;
mod watching;
