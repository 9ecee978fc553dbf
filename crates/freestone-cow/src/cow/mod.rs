//! Snapshots with dm-snapshot's semantics and on-disk format, over any origin and any COW device.
//!
//! A chunk of the origin is copied to the COW device before the chunk is overwritten; the copy is
//! an *exception*. The exception [`store`] allocates the chunks for copies. A persistent store
//! records the exceptions in the kernel's format, so a COW device can move between this program and
//! a kernel.
//!
//! * [`store`]: the exception store and its format.
//! * `state`: the state shared by an origin and its snapshots, and the lock order.
//! * `requests`: reads, writes and copies in progress.
//! * `devices`: origins and snapshots: their preparation, merge and power loss.
//!
//! Each room uses only those above it. `config`, `exceptions`, `notes`, `status` and `tokens` are below all.

mod config;
mod devices;
mod exceptions;
mod notes;
mod requests;
mod state;
mod status;
pub mod store;
mod tokens;

pub use config::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, Config, SetupError, StoreKind};
pub use devices::merge::MergeSetupError;
pub use devices::origin::Origin;
pub use devices::pending::PendingSnapshot;
pub use devices::power::PowerOff;
pub use devices::snapshot::{Snapshot, SnapshotStats};
pub use notes::{LastSession, Notes, Stamp};
pub use state::content::MissedWrites;
pub use state::merge_state::{MergeFailure, MergeStatus};
pub use status::{Status, Usage};
pub use store::format::CHUNK_BYTES_DEFAULT;
