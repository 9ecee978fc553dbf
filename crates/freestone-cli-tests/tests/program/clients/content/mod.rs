//! Content of devices under clients: forks, snapshots, saved files, full memory and backing devices.

mod cancelling;
mod forks;
mod full;
mod memory_limit;
mod merging;
mod overwriting;
mod saved;
mod snapshots;
mod stale_stores;
mod templates;
mod writeback;
