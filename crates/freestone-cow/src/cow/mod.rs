//! Snapshots with dm-snapshot's semantics and on-disk format, over any origin and any COW device.
//!
//! A chunk of the origin is copied to the COW device before the chunk is overwritten; the copy is
//! an *exception*. The exception [`store`] allocates the chunks for copies. A persistent store
//! records the exceptions in the kernel's format, so a COW device can move between this program and
//! a kernel.

mod config;
mod content;
mod copy;
mod exceptions;
mod format;
mod loss;
mod merge;
mod merge_state;
mod notes;
mod origin;
mod origin_write;
mod pending;
mod power;
mod reads;
mod small_blocks;
mod snapshot;
mod state;
mod status;
pub mod store;
mod store_area;
mod store_load;
mod store_queue;
mod store_transient;
mod store_types;
mod tokens;
mod wait_group;
mod writes;

pub use config::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, Config, SetupError, StoreKind};
pub use content::MissedWrites;
pub use format::CHUNK_BYTES_DEFAULT;
pub use merge::MergeSetupError;
pub use merge_state::{MergeFailure, MergeStatus};
pub use notes::{LastSession, Notes, Stamp};
pub use origin::Origin;
pub use pending::PendingSnapshot;
pub use power::PowerOff;
pub use snapshot::{Snapshot, SnapshotStats};
pub use status::{Status, Usage};
