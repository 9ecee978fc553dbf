//! Saving and restoring RAM disks, forks, and families (disks, snapshots and forks that share
//! memory).
//!
//! The tests assume that a rename is atomic, and that data synced before the rename survives a
//! crash. An unsynced write may survive, be zeroes, or be the old data at its position, in any
//! order. So an unsynced file may be truncated, have holes, or be mixed with an older file. None of
//! these may be accepted as a saved disk.

mod bad_files;
mod crash;
mod forged;
mod moments;
mod round_trips;
mod spilled;
mod support;
