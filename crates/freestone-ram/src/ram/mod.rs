//! Compressed RAM disks with the semantics of zram, in user space, and their forks and snapshots.
//!
//! A disk consists of a slot table, an object pool and one compression stream per CPU. Pages that
//! repeat a pattern of up to 64 bits store only the pattern. Incompressible pages are stored as
//! they are, all others compressed. Requests for different pages share no lock: each uses the lock
//! bit of its slot, and the stream and current span of its CPU. A write takes a pool lock only if
//! the pool grows, shrinks or reaches its limit.
//!
//! A [`Ram`] is a disk, a fork (an empty slot reads through to its base) or a snapshot (read-only).
//! All devices made from one another form a [`Family`], and share its pool, compression streams,
//! memory limit and backing device.
//!
//! Write zeroes frees memory, even if an NBD client asks to keep the space allocated (`NO_HOLE`): a
//! RAM disk cannot reserve space.
//!
//! Deliberate differences from zram:
//! * Logical blocks are 512 bytes; a write of part of a page modifies it under the slot's lock
//!   (zram: 4096 bytes, no lock).
//! * A write that the memory limit refuses fails with
//!   [`Error::NoSpace`](freestone_core::device::Error::NoSpace) (zram: an I/O error).
//! * [`reset`](Ram::reset) wipes content and statistics and keeps size, algorithm and limit (zram
//!   forgets them). A reset needs no exclusive claim: concurrent readers see the old or the new,
//!   empty content.
//! * The disk can grow while it is in use.
//! * Pages are written back to a backing device automatically, packed; see [`Config::backing`].
//! * `invalid_io` counts rejected requests, as in kernels up to 6.1; newer kernels print 0.

// A room uses only rooms before it: geometry, waiting, memory, spilling and recompress, device,
// requests, family, content and maintenance.
pub(crate) mod content;
pub(crate) mod device;
mod family;
mod geometry;
mod maintenance;
mod memory;
mod recompress;
mod requests;
mod spilling;
#[cfg(test)]
mod tests;
mod waiting;

pub use self::content::block_state::BlockState;
pub use self::content::contents::Contents;
pub use self::content::export::ParentDevice;
pub use self::device::Ram;
pub use self::device::settings::NoWaitGuard;
pub use self::device::snapshot::PendingSnapshot;
pub use self::device::stats::{DebugStat, IoStat, MemoryOverhead, MmStat, OverStat};
pub use self::family::{AdoptError, Adopted, Family, FamilyFiles, FamilyMemory, FamilyStat, WeakFamily};
pub use self::geometry::DISKSIZE_BYTES_MAX;
pub use self::memory::ages::IdleSelection;
pub use self::memory::config::{Backing, Config, ForkConfig, Secondary, SetupError};
pub use self::memory::outcome::{WritebackError, WritebackReport};
pub use self::recompress::auto::AutoRecompressStat;
pub use self::recompress::dedup::DedupStat;
pub use self::recompress::groups::GroupStat;
pub use self::recompress::options::{RecompressError, RecompressKind, RecompressOptions, RecompressReport};
pub use self::requests::extents::OverBaseView;
pub use self::spilling::writeback::{BackingStat, BdStat, Writeback};
pub use self::waiting::full_policy::FullPolicy;
pub use crate::pool::redo::LAYOUT as FAMILY_LAYOUT;
