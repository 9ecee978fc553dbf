//! Tests of the built program as users run it: command line, sockets, standard clients, test
//! drives, and stalled clients, disks and verbs.

// Provides a `#[test]` that passes if a program is missing outside continuous integration.
#[macro_use]
extern crate freestone_testkit;

mod cli;
mod clients;
mod docs;
mod drives;
mod harness;
mod limits;
mod release;
mod restarts;
mod stalls;
mod storage;
mod watching;
