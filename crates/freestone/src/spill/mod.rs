//! Spilling: pages of a RAM disk on a backing device.

pub mod blocks;
pub mod layout;
pub mod space;
pub mod store;
