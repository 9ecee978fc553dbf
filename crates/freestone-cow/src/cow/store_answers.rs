//! What an exception store answers.

use thiserror::Error;

use super::config::Damage;
use freestone_core::device;

/// Exceptions: (chunk of the origin, chunk of the COW device).
pub type Exceptions = Vec<(u64, u64)>;

/// Why there is no place for a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NoPlace {
    /// There is no room on the COW device.
    #[error("the COW device is full")]
    Full,
    /// The snapshot is lost.
    #[error("the snapshot is invalid")]
    Invalid,
}

/// The snapshot is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the snapshot is invalid")]
pub struct Invalid;

/// The exceptions that were committed last: chunks `old..old + count` of the origin are at
/// `new..new + count` of the COW device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First chunk of the origin.
    pub old: u64,
    /// First chunk of the COW device.
    pub new: u64,
    /// Chunks, at least one. The last of them is the newest.
    pub count: u64,
}

/// Why exceptions could not be merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum MergeError {
    /// A transient store has no record to take exceptions from.
    #[error("a transient snapshot cannot be merged")]
    Transient,
    /// The snapshot is lost.
    #[error("the snapshot is invalid")]
    Invalid,
    /// The record is not what it was when it was loaded.
    #[error("the exception store is damaged: {0}")]
    Damaged(Damage),
    /// More than the last run, or another exception came after it.
    #[error("these are not the last exceptions any more")]
    NotLast,
    /// The device failed.
    #[error("the COW device failed: {0}")]
    Device(#[from] device::Error),
}

/// What a store did so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Exceptions that were made durable.
    pub exceptions: u64,
    /// Groups they were in: writes of the record, each behind a flush.
    pub groups: u64,
    /// Exceptions of the largest group.
    pub largest_group: u64,
}
