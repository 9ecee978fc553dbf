//! Verbs on the content of devices: saved files, changes, images in object storage, and the memory of RAM disks.

pub mod block_state;
pub mod compact;
pub mod delta;
pub mod idle;
pub mod pull;
pub mod push;
pub mod recompress;
pub mod restore;
pub mod save;
pub mod trace;
pub mod writeback;
