//! Freestone: virtual block devices whose locks are as fine as one page, one chunk or one zone.
//!
//! Start with [`device`], the contract between devices and exports; [`ram`] is the compressed RAM disk.

#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "the models use parts of the library"))]

// Offsets and lengths are cast between u64 and usize all over.
const _: () = assert!(usize::BITS == 64, "Freestone needs a 64-bit machine");

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// Bytes of a page: what one slot of a page table stands for.
pub const PAGE_BYTES: usize = 4096;

#[cfg(not(loom))]
mod age;
pub mod device;
mod parking;
mod pin;
mod slot;
mod sync;

#[cfg(not(loom))]
mod arena;
#[cfg(not(loom))]
mod clock;
#[cfg(not(loom))]
pub mod codec;
#[cfg(not(loom))]
pub mod cow;
#[cfg(not(loom))]
pub mod door;
#[cfg(not(loom))]
pub mod faults;
#[cfg(not(loom))]
pub mod file;
#[cfg(not(loom))]
mod gate;
#[cfg(not(loom))]
mod handoff;
mod held;
#[cfg(not(loom))]
pub mod moment;
#[doc(hidden)]
pub mod mutants;
#[cfg(not(loom))]
mod near;
#[cfg(not(loom))]
pub mod null;
#[cfg(not(loom))]
mod percpu;
#[cfg(not(loom))]
mod pool;
#[cfg(not(loom))]
pub mod power;
#[cfg(not(loom))]
pub mod qcow2;
#[cfg(not(loom))]
pub mod ram;
#[cfg(not(loom))]
pub mod replace;
#[cfg(not(loom))]
mod runner;
#[cfg(not(loom))]
pub mod save;
#[cfg(not(loom))]
mod spill;
#[cfg(not(loom))]
mod timer;
#[cfg(not(loom))]
mod unique;
#[cfg(freestone_variants)]
#[path = "../../../benches/variants/mod.rs"]
pub mod variants;
#[cfg(not(loom))]
pub mod zone;

#[cfg(loom)]
mod percpu {
    //! A model has one CPU.
    pub const fn cpus() -> usize {
        1
    }
    pub const fn current() -> usize {
        0
    }
}

#[cfg(loom)]
mod pool {
    //! What of the pool is modelled: the states of spans.
    pub mod class;
    mod spans;

    #[cfg(test)]
    mod models;
}

#[cfg(loom)]
mod spill {
    //! What of spilling is modelled: how blocks of the backing go round.
    pub mod blocks;
    pub mod space;

    #[cfg(test)]
    mod models;
}

#[cfg(loom)]
mod cow {
    //! What of snapshots is modelled: how exceptions are made, and how copies in flight are bounded.
    pub mod exceptions;
    mod tokens;

    #[cfg(test)]
    mod models;
}

#[cfg(loom)]
mod zone {
    //! What of zones is modelled: their locks, conditions and resources.
    mod layout;
    mod lock;
    mod resources;
    mod states;
    mod word;

    #[cfg(test)]
    mod models;
}
