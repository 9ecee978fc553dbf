//! Result and error types of an exception store.

use thiserror::Error;

use crate::cow::config::Damage;
use freestone_core::device;

/// List of exceptions as pairs: chunk of the origin, chunk of the COW device.
pub type Exceptions = Vec<(u64, u64)>;

/// Errors from allocating a chunk for a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum AllocateError {
    /// The COW device is full.
    #[error("the COW device is full")]
    Full,
    /// The snapshot is lost.
    #[error("the snapshot is invalid")]
    Invalid,
}

/// Error from an operation on the exception store of a lost snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the snapshot is invalid")]
pub struct Invalid;

/// Run of the last committed exceptions: chunks `old..old + count` of the origin, stored in
/// `new..new + count` of the COW device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Number of the first chunk on the origin.
    pub old: u64,
    /// Number of the first chunk on the COW device.
    pub new: u64,
    /// Number of chunks, at least 1. The last chunk is the newest.
    pub count: u64,
}

/// Errors from merging exceptions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum MergeError {
    /// The store is transient, so it has no exceptions on disk to merge.
    #[error("a transient snapshot cannot be merged")]
    Transient,
    /// The snapshot is lost.
    #[error("the snapshot is invalid")]
    Invalid,
    /// The list of exceptions on disk has changed since it was loaded.
    #[error("the exception store is damaged: {0}")]
    Damaged(Damage),
    /// The exceptions are not the last exceptions in the list.
    #[error("these exceptions are not the last ones of the store any more")]
    NotLast,
    /// The COW device failed.
    #[error("the COW device failed: {0}")]
    Device(#[from] device::Error),
}

/// Counters of an exception store since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Number of exceptions that were made durable.
    pub exceptions: u64,
    /// Number of groups of exceptions. Each group was written by one write of metadata, after a
    /// flush.
    pub groups: u64,
    /// Number of exceptions in the largest group.
    pub largest_group: u64,
}
