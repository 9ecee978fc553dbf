//! Test drives, and layers that change the behavior of another block device. The modules are
//! [`null`] devices, emulated [`zone`]s, injected [`faults`], simulated [`power`] loss, [`quiesce`]
//! and [`view`]s. [`quantity`] parses sizes and times.

#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "the models use parts of the library"))]

#[cfg(not(loom))]
pub mod faults;
#[cfg(not(loom))]
pub mod null;
#[cfg(not(loom))]
pub mod power;
#[cfg(not(loom))]
pub mod quantity;
#[cfg(not(loom))]
pub mod quiesce;
#[cfg(not(loom))]
pub mod view;
#[cfg(not(loom))]
pub mod zone;

#[cfg(loom)]
mod zone {
    //! The parts of the zone layer that loom models check: locks, conditions and resources.
    mod table;
}
