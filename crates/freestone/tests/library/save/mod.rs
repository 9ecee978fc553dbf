//! Saving and restoring RAM disks, forks and families.
//!
//! What is taken for granted of the machine: a rename is atomic, and what was synced before it is
//! there after it. A write that was not synced may be there, be zeroes, or be what lay in its place
//! before; in any order. So a file that was not synced can be cut, holed, and mixed with an older
//! one, and none of that may be taken for a saved disk.

mod bad_files;
mod crash;
mod forged;
mod moments;
mod round_trips;
mod spilled;
mod support;
