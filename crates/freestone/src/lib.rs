//! Freestone: virtual block devices with fine-grained locks, one per page, chunk or zone.
//!
//! Start with [`device`], the contract between devices and exports. [`ram`] is the compressed RAM
//! disk. Each kind of device has its own crate over `freestone-core`; this crate re-exports them.

/// Runs the example of the README as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

pub use freestone_core::{
    PAGE_BYTES, budget, concurrency_limit, consistency_group, device, limits, mutants, plug, replace, sync,
    trail,
};
pub use freestone_cow::cow;
pub use freestone_drive::{faults, null, power, quantity, quiesce, view, zone};
pub use freestone_image::{file, qcow2};
pub use freestone_ram::{codec, ram};
pub use freestone_save::{keep, save};
pub use freestone_store as store;
