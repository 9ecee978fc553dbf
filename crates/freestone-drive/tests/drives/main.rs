//! Test drives: fault rules, power cuts and recordings, and zones. Built as one program.

// Outside continuous integration, a test with this `#[test]` passes if a program that it needs is
// missing.
#[macro_use]
extern crate freestone_testkit;

mod faults;
mod power;
mod zones;
