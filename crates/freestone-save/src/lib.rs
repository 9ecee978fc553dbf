//! Saved content of RAM disks. [`save`] saves families of disks to files, and [`keep`] keeps the
//! content of disks in a directory across restarts.
//!
//! A family is a base and its forks, which share memory.

pub mod keep;
pub mod save;
