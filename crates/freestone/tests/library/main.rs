//! The library's tests, from outside: one program, as each more is linked again with every change
//! and under each sanitizer. What counts something of the whole process has a program of its own
//! (resident.rs), or runs itself as a child.

// `#[test]` passes if a program is missing and this is not continuous integration.
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
