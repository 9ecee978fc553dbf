//! Pages of RAM disks on a backing device: block allocation, layout, reads, writes and time-outs.
//!
//! [`store::Store`] owns a backing device. A RAM disk decides which pages leave memory and when a
//! page is read back. This crate decides where the objects of pages are on the device.

#![allow(missing_docs, reason = "a part of RAM disks: only what a name does not say has a comment")]
#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "the models use parts of the library"))]

pub mod blocks;
#[cfg(not(loom))]
pub mod budget;
#[cfg(not(loom))]
pub mod clean_copies;
#[cfg(not(loom))]
mod deadline;
#[cfg(not(loom))]
pub mod layout;
#[cfg(not(loom))]
pub mod objects;
#[cfg(not(loom))]
pub mod reads;
pub mod space;
#[cfg(not(loom))]
pub mod store;
#[cfg(not(loom))]
pub mod writes;

#[cfg(all(test, loom))]
mod models;
