//! Kinds whose data lies in memory that a family shares: RAM disks, forks, templates and restored devices.
//!
//! `kinds` builds devices of this room, and `snapshot` adds snapshots in memory to them.

pub(super) mod fork;
pub(super) mod ram;
pub(super) mod recoverable;
pub(super) mod restored;
pub(super) mod shared_family;
pub(super) mod template;
