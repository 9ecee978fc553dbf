//! Families of RAM disks: forks, snapshots, rewinds, removals.

mod basics;
mod hunt;
mod memory;
mod model;
mod race;
