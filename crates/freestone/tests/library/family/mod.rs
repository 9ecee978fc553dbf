//! Families of RAM disks (devices that share memory): forks, snapshots, rewinds and removals.

mod basics;
mod memory;
mod model;
mod race;
mod regressions;
