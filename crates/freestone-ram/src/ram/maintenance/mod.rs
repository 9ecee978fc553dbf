//! Maintenance of a device's memory on request: writeback, recompression, idle marks and compaction.
//!
//! The room has the methods of [`Ram`](super::Ram); the work is done in the rooms of evictions,
//! recompression and memory.

mod compact;
mod idle;
mod recompress;
mod writeback;
