//! Families of RAM disks: forks, snapshots, rewinds, removals.

mod basics;
mod memory;
mod model;
mod race;
mod regressions;
