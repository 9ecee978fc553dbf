//! Drives for tests, and what lies over other devices to test those who use them: [`null`] devices,
//! [`zone`]s, [`faults`], loss of [`power`], and a layer that can be shut ([`quiesce`]), and views
//! of a device ([`view`]). Their settings have sizes and times, as people type them ([`quantity`]).

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
    //! What of zones is modelled: their locks, conditions and resources.
    mod layout;
    mod resources;
    mod states;
    mod word;

    #[cfg(test)]
    mod models;
}
