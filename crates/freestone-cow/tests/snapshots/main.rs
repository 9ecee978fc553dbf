//! Snapshots of origins: content, exception stores, merges, and crashes. Built as one program. The origins and COW
//! devices are RAM disks, files and devices of the test kit.

// Outside continuous integration, a test with this `#[test]` passes if a program that it needs is
// missing.
#[macro_use]
extern crate freestone_testkit;

mod conformance;
mod failed_writes;
mod holes;
mod invalid;
mod map;
mod merge;
mod older;
mod power;
mod repeated_power_loss;
mod store;
mod support;
