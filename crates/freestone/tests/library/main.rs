//! Integration tests of the library in one program, because each further program is linked again
//! for every change and every sanitizer. Tests that measure the whole process have their own
//! program (resident.rs) or run themselves as a child process.

// This `#[test]` passes if a program is missing outside continuous integration.
#[macro_use]
extern crate freestone_testkit;

mod cow;
mod devices;
mod family;
mod faults;
mod pinned;
mod power;
mod qcow2;
mod save;
mod writeback;
mod zones;
