//! Crash states of a recorded run: every content that a disk may have after a power loss, each
//! given to a check.
//!
//! A [`Timeline`] is a log of writes (dm-log-writes, see [`freestone_drive::power::log`]) over the
//! content of a disk at the start of the recording. A walk applies the log once, forward, to one
//! RAM disk. A [`State`] is a fork of a snapshot of that disk, so it costs as much memory and time
//! as the writes in which it differs.
//!
//! [`explore()`] chooses states by [`Model`]s, omits states with equal content, runs a [`Check`] on
//! the others in parallel, and reduces each failure to the smallest set of lost writes.
//!
//! Modules, each of which uses only modules before it: `id`, `digest`, `disk`, `report`, `epoch`,
//! `timeline`, `state`, `walk`, `candidates`, `schedule`, `run`, `shrink`, `reduction`, `explore`.

mod candidates;
mod digest;
mod disk;
mod epoch;
mod explore;
mod id;
mod reduction;
mod report;
mod run;
mod schedule;
mod shrink;
mod state;
mod timeline;
mod walk;

use std::io;

use freestone_core::device;
use freestone_drive::power::log;
use freestone_ram::ram::SetupError;
use thiserror::Error;

pub use disk::SwitchedDisk;
pub use explore::{Budget, Options, changes_at, explore, state_at};
pub use id::{LostPart, ParseIdError, StateId};
pub use report::{End, Failure, Flaky, LostWrite, Phase, Progress, Report, Verdict};
pub use run::{Check, Watch};
pub use schedule::Model;
pub use state::State;
pub use timeline::{Base, Timeline};

/// Size in bytes of a block that a disk writes whole, unless the model tears blocks.
pub const BLOCK_BYTES: u64 = 4096;

/// Smallest unit of the model [`Model::Torn`], in bytes.
pub const UNIT_MIN_BYTES: u64 = 512;

/// Maximum number of unflushed versions of blocks between two flushes. Limited because each uses
/// about 150 bytes of memory.
pub const VERSIONS_MAX: usize = 1 << 20;

/// Errors of an exploration.
#[derive(Debug, Error)]
pub enum ExploreError {
    /// The log cannot be read, is damaged, or does not fit the disk.
    #[error(transparent)]
    Log(#[from] log::Error),
    /// The disk of the exploration cannot be created or forked.
    #[error("the RAM disk of the exploration: {0}")]
    Disk(#[from] SetupError),
    /// A request to the disk of the exploration failed.
    #[error("{what} failed: {error}{}", hint(*error))]
    Device {
        /// Name of the operation.
        what: String,
        /// Error of the device.
        error: device::Error,
    },
    /// More than [`VERSIONS_MAX`] versions of blocks are unflushed.
    #[error(
        "entry {entry}: more than {VERSIONS_MAX} blocks of {unit} bytes were written since the last flush; \
         only the model prefix can explore this log"
    )]
    TooManyUnflushed {
        /// Number of the entry, from 1.
        entry: u64,
        /// Size of a block in bytes.
        unit: u64,
    },
    /// A unit that the log or the models do not allow.
    #[error("a unit of {unit} bytes is not a power of two from {min} to {max}")]
    BadUnit {
        /// Unit that was requested, in bytes.
        unit: u64,
        /// Smallest unit for the log: its sector.
        min: u64,
        /// Largest unit.
        max: u64,
    },
    /// A state that the log does not have.
    #[error("state {id}: {why}")]
    NoState {
        /// Identifier of the state.
        id: StateId,
        /// Reason.
        why: String,
    },
    /// The check could not be run.
    #[error("{0}")]
    Check(String),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] io::Error),
}

/// Result of an exploration's step.
pub type Result<T> = std::result::Result<T, ExploreError>;

/// Returns advice on a device error, or an empty string.
fn hint(error: device::Error) -> &'static str {
    match error {
        device::Error::NoSpace => "; the memory limit is reached",
        _ => "",
    }
}

/// Converts an error of a device, with the name of the operation.
fn failed(what: impl Into<String>) -> impl FnOnce(device::Error) -> ExploreError {
    move |error| ExploreError::Device { what: what.into(), error }
}
