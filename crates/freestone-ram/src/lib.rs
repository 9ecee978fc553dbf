//! The compressed RAM disk, its forks and its snapshots: [`ram`] is what they can be asked for,
//! [`codec`] compresses pages, [`save`] saves families of disks to files, [`keep`] keeps them in a
//! directory across restarts.

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
    //! What of the pool is modelled: the states of spans.
    pub mod class;
    mod span_table;
    mod spans;

    #[cfg(test)]
    mod models;
}

#[cfg(loom)]
mod ram {
    //! What of RAM disks is modelled: requests that wait for room.
    mod room_waiters;

    #[cfg(test)]
    mod room_models;
}

#[cfg(loom)]
mod spill {
    //! What of spilling is modelled: how blocks of the backing go round.
    pub mod blocks;
    pub mod space;

    #[cfg(test)]
    mod models;
}
