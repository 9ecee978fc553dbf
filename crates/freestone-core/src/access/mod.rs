//! Ways to call a device: at any offset and length, with or without waiting, and the search for zeroes.
//!
//! Exports, and devices that have a lower device, use these modules. They use the device interface and
//! [`workers`](crate::workers).

pub mod bytes;
#[cfg(not(loom))]
pub mod handoff;
pub mod zeroes;
