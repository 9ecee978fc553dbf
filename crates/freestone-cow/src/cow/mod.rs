//! Snapshots with dm-snapshot's semantics and on-disk format, over any origin and any device that
//! holds the exceptions.
//!
//! A chunk of the origin that is about to change is first copied to the COW device; that copy is an
//! *exception*. The [`store`] decides where copies go and, where it is persistent, remembers that
//! in the kernel's own format, so a COW device can be written here and read there, and the other
//! way round.

mod age;
mod blocks;
mod config;
mod copy;
mod exceptions;
mod format;
mod gather;
mod loss;
mod merge;
mod merge_state;
mod notes;
mod origin;
mod origin_write;
mod pending;
mod power;
mod reads;
mod snapshot;
mod state;
mod status;
pub mod store;
mod store_answers;
mod store_area;
mod store_load;
mod store_queue;
mod store_transient;
mod tokens;
mod writes;

pub use age::Missed;
pub use config::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, Config, SetupError, StoreKind};
pub use format::CHUNK_BYTES_DEFAULT;
pub use merge::MergeSetupError;
pub use merge_state::{MergeFailure, MergeStatus};
pub use notes::{Left, Notes, Stamp};
pub use origin::Origin;
pub use pending::PendingSnapshot;
pub use power::PowerOff;
pub use snapshot::{Snapshot, SnapshotStats};
pub use status::{Status, Usage};
