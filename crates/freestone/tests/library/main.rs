//! Integration tests of the library, built as one program. Each further program would be linked
//! again for every change and every sanitizer. Tests that measure the whole process have their own
//! program (`resident.rs`) or run themselves as a child process.

// Outside continuous integration, a test with this `#[test]` passes if a program that it needs is
// missing.
#[macro_use]
extern crate freestone_testkit;

mod devices;
mod family;
mod pinned;
mod qcow2;
mod save;
mod writeback;
