//! Saving and restoring RAM disks, forks and families.
//!
//! Assumptions about the machine: a rename is atomic, and data synced before it survives. An
//! unsynced write may survive, be zeroes, or be the old data at its position, in any order. So an
//! unsynced file may be truncated, have holes, and be mixed with an older file, and none of these
//! may be accepted as a saved disk.

mod bad_files;
mod crash;
mod forged;
mod moments;
mod round_trips;
mod spilled;
mod support;
