//! Evictions: pages that move from memory to the backing device, on request or when memory is short,
//! and reclaim of the holes that they leave there.
//!
//! The keeper thread and the rooms of devices use this one. An eviction, a reclaim and a recompression
//! exclude each other by [`Pages::background`](super::memory::pages::Pages::background), the first
//! lock of the order.

mod batch;
mod evict_batches;
pub(in crate::ram) mod evict_rounds;
mod grouped_pages;
mod picked_slots;
pub(in crate::ram) mod reclaim;
mod shared_pages;
pub(in crate::ram) mod writeback;
