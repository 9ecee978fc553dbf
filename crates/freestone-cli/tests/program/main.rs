//! Tests of the built program as users meet it: command line, sockets, clients that Debian ships,
//! test drives, and stalled clients, disks and verbs.

// This `#[test]` passes if a program is missing outside continuous integration.
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
