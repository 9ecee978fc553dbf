//! The compressed RAM disk with its forks and snapshots. [`ram`] is the device interface, and
//! [`codec`] compresses pages. [`save`] saves families of disks to files, and [`keep`] keeps the
//! content of disks in a directory across restarts.
//!
//! A family is a base and its forks, which share memory.

#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "the models use parts of the library"))]

#[cfg(not(loom))]
mod age;
#[cfg(not(loom))]
mod clock;
#[cfg(not(loom))]
pub mod codec;
#[cfg(all(test, not(loom)))]
mod effort;
#[cfg(not(loom))]
pub mod keep;
#[cfg(not(loom))]
mod pool;
#[cfg(not(loom))]
pub mod ram;
#[cfg(not(loom))]
pub mod save;
#[cfg(not(loom))]
mod spill;

#[cfg(loom)]
mod pool {
    //! The part of the pool that loom models check: the states of spans.
    pub mod class;
    mod span_table;
    mod spans;

    #[cfg(test)]
    mod models;
}

#[cfg(loom)]
mod ram {
    //! The part of RAM disks that loom models check: requests that wait for space.
    mod space_waiters;

    #[cfg(test)]
    mod space_models;
}

#[cfg(loom)]
mod spill {
    //! The part of spilling that loom models check: allocation of blocks on the backing device.
    pub mod blocks;
    pub mod space;

    #[cfg(test)]
    mod models;
}
