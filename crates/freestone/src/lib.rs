#![doc = include_str!("../README.md")]
//!
//! # Modules
//! Start with [`device`], the contract between devices and clients. [`ram`] is the compressed RAM disk, [`cow`] has
//! snapshots of any device. [`null`], [`zone`], [`faults`] and [`power`] are test drives. [`file`](mod@file) and [`qcow2`] are images,
//! and [`store`] has images in object storage.

pub use freestone_core::{PAGE_BYTES, budget, consistency_group, device, limits, plug};
// For the crates of Freestone.
#[doc(hidden)]
pub use freestone_core::{concurrency_limit, mutants, replace, sync, trail};
pub use freestone_cow::cow;
pub use freestone_drive::{faults, null, power, quantity, quiesce, view, zone};
pub use freestone_image::{file, qcow2};
pub use freestone_ram::{codec, ram};
pub use freestone_save::{keep, save};
pub use freestone_store as store;
