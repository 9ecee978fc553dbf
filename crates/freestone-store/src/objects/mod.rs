//! Interface to object storage.
//!
//! An object is written as a whole. The storage may respond late, with wrong data or not at all, and other
//! clients may write and delete objects at any time. Callers verify all data that they read.

mod directory;

use crate::rt::time::{Duration, Instant, SystemTime};
use std::ops::Range;

use thiserror::Error;

pub use directory::Directory;

/// Maximum length of an object key in bytes, the same as in S3.
pub const KEY_BYTES_MAX: usize = 1024;

/// Deadline and cancellation of a call to object storage.
#[derive(Clone, Copy)]
pub struct CallLimits<'a> {
    /// Time at which a call that is not complete fails with [`Fault::TimedOut`].
    pub deadline: Instant,
    /// Cancellation check, called at least ten times per second while the call waits. If the check returns
    /// true, the call fails with [`Fault::Cancelled`].
    pub is_cancelled: &'a (dyn Fn() -> bool + Sync),
}

impl<'a> CallLimits<'a> {
    /// Returns limits with a deadline after `time`, without cancellation.
    pub fn within(time: Duration) -> CallLimits<'static> {
        CallLimits { deadline: Instant::now() + time, is_cancelled: &|| false }
    }

    /// Returns the same limits, but with a deadline at most `time` from now.
    #[must_use]
    pub fn at_most(&self, time: Duration) -> CallLimits<'a> {
        CallLimits { deadline: self.deadline.min(Instant::now() + time), ..*self }
    }

    /// Fails if the call was cancelled or its deadline has passed.
    ///
    /// # Errors
    /// [`Fault::Cancelled`] after cancellation; [`Fault::TimedOut`] after the deadline.
    pub fn check(&self) -> Result<()> {
        if (self.is_cancelled)() {
            return Err(Fault::Cancelled);
        }
        if Instant::now() >= self.deadline { Err(Fault::TimedOut) } else { Ok(()) }
    }
}

/// Version of an object: the entity tag (`ETag`) from the store, without quotes. Some stores give equal
/// contents the same tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version(pub String);

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListEntry {
    /// Key of the object.
    pub key: String,
    /// Size of the object in bytes.
    pub bytes: u64,
    /// Modification time by the clock of the store. Some stores count whole seconds.
    pub modified: SystemTime,
}

/// Metadata of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// Size of the object in bytes.
    pub bytes: u64,
    /// Modification time by the clock of the store. Some stores count whole seconds.
    pub modified: SystemTime,
    /// Version of the object, if the store has versions.
    pub version: Option<Version>,
}

/// Content of an object, or of a byte range of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Read {
    /// Requested bytes; fewer if the object ends within the requested range.
    pub bytes: Vec<u8>,
    /// Version of the whole object, if the store has versions.
    pub version: Option<Version>,
}

/// Condition of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteCondition<'a> {
    /// Write in any case.
    Always,
    /// Write only if the object does not exist.
    Absent,
    /// Write only if the object still has this version.
    Unchanged(&'a Version),
}

/// Reason why a call to object storage failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Fault {
    /// The object does not exist.
    #[error("there is no such object")]
    NotFound,
    /// The condition of the write or deletion does not hold. Nothing was changed.
    #[error("the object exists, or was changed")]
    Condition,
    /// The store denies access to the object.
    #[error("the store refuses: {0}")]
    Denied(String),
    /// A retry may succeed: the store is busy, a connection failed, or a response was cut off. A write may
    /// have been carried out.
    #[error("{0}")]
    Transient(String),
    /// The object is longer than the limit of the call, in bytes.
    #[error("the object has more than {0} bytes")]
    TooLong(u64),
    /// The deadline passed. A write may have been carried out, or may still be.
    #[error("no answer in time")]
    TimedOut,
    /// The caller cancelled the call. A write may have been carried out.
    #[error("cancelled")]
    Cancelled,
    /// The store does not support the operation: it is read-only, or has no conditions.
    #[error("{0}")]
    Unsupported(String),
    /// Another failure. A retry would fail too.
    #[error("{0}")]
    Other(String),
}

impl Fault {
    /// Returns true if a retry of the call may succeed.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Transient(_) | Self::TimedOut)
    }
}

/// Result of a call to object storage.
pub type Result<T> = std::result::Result<T, Fault>;

/// Object storage. Calls block until the response arrives, and any number of threads may call at once. A call
/// makes one attempt; callers retry.
pub trait Objects: Send + Sync {
    /// Returns the URL of the object storage, without credentials.
    fn url(&self) -> &str;

    /// Reads an object, or the non-empty byte range `part` of the object. `most` is the maximum length in
    /// bytes.
    ///
    /// # Errors
    /// [`Fault::TooLong`] if the object, or the range, is longer than `most`.
    fn get(&self, key: &str, part: Option<Range<u64>>, most: u64, limits: CallLimits<'_>) -> Result<Read>;

    /// Writes an object atomically, and returns its version if the store has versions.
    ///
    /// # Errors
    /// [`Fault::Condition`] if `condition` does not hold; [`Fault::Unsupported`] if the store is read-only or
    /// does not support `condition`.
    fn put(
        &self,
        key: &str,
        bytes: &[u8],
        condition: WriteCondition<'_>,
        limits: CallLimits<'_>,
    ) -> Result<Option<Version>>;

    /// Returns the metadata of an object.
    ///
    /// # Errors
    /// [`Fault::NotFound`] if the object does not exist, and other faults of the request.
    fn head(&self, key: &str, limits: CallLimits<'_>) -> Result<Head>;

    /// Lists the objects whose keys begin with `prefix`, which is empty or ends with `/`. The order is
    /// unspecified. The listing ends if `each` returns false. Objects written, replaced or deleted meanwhile
    /// may be listed or omitted. `each` must not call the store.
    ///
    /// # Errors
    /// [`Fault::Unsupported`] if the store cannot list objects.
    fn list(
        &self,
        prefix: &str,
        each: &mut dyn FnMut(ListEntry) -> bool,
        limits: CallLimits<'_>,
    ) -> Result<()>;

    /// Deletes an object. Succeeds if the object does not exist.
    ///
    /// # Errors
    /// [`Fault::Unsupported`] if the store is read-only.
    fn delete(&self, key: &str, limits: CallLimits<'_>) -> Result<()>;

    /// Deletes an object unless it was written again since `version` was read, even with the same content.
    ///
    /// # Errors
    /// [`Fault::Condition`] if the object was written again or is missing. [`Fault::Unsupported`], without a
    /// request, if the store has no conditional deletion.
    fn delete_unchanged(&self, key: &str, version: &Version, limits: CallLimits<'_>) -> Result<()> {
        let _ = (key, version, limits);
        Err(Fault::Unsupported("the store has no deletion with a condition".to_owned()))
    }

    /// Reads the host clock that measures times between requests. The clock also counts while the host is
    /// suspended. A store with a simulated clock overrides this method.
    fn uptime(&self) -> Duration {
        crate::rt::uptime()
    }
}
