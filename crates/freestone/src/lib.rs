//! Freestone: virtual block devices whose locks are as fine as one page, one chunk or one zone.
//!
//! Start with [`device`], the contract between devices and exports; [`ram`] is the compressed RAM
//! disk. Each kind of device is a crate of its own over `freestone-core`; this one is their common
//! face.

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

pub use freestone_core::{
    PAGE_BYTES, budget, consistency_group, device, limits, mutants, places, plug, replace,
};
pub use freestone_cow::cow;
pub use freestone_drive::{faults, null, power, quantity, quiesce, view, zone};
pub use freestone_image::{file, qcow2};
pub use freestone_ram::{codec, keep, ram, save};
pub use freestone_store as store;
