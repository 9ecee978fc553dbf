//! Where objects lie: what is asked of a store, whichever it is.
//!
//! An object is written whole and never in parts. A store may answer late, wrong or not at all, and
//! others may write and delete in it at any time; nothing that comes from it is believed before it was
//! verified.

mod directory;

use crate::rt::time::{Duration, Instant, SystemTime};
use std::ops::Range;

use thiserror::Error;

pub use directory::Directory;

/// Longest key of an object in bytes; that of S3.
pub const KEY_BYTES_MAX: usize = 1024;

/// How long a call may take, and who ends it earlier.
#[derive(Clone, Copy)]
pub struct Until<'a> {
    /// The call has failed with [`Fault::Late`] by then.
    pub deadline: Instant,
    /// Asked at least ten times a second while the call waits: when it answers true the call fails with
    /// [`Fault::Cancelled`].
    pub is_over: &'a (dyn Fn() -> bool + Sync),
}

impl<'a> Until<'a> {
    /// From now on, with nobody who ends it.
    pub fn within(time: Duration) -> Until<'static> {
        Until { deadline: Instant::now() + time, is_over: &|| false }
    }

    /// The same, but so long at most.
    #[must_use]
    pub fn at_most(&self, time: Duration) -> Until<'a> {
        Until { deadline: self.deadline.min(Instant::now() + time), ..*self }
    }

    /// Whether a call has to end.
    ///
    /// # Errors
    /// [`Fault::Cancelled`], [`Fault::Late`].
    pub fn check(&self) -> Result<()> {
        if (self.is_over)() {
            return Err(Fault::Cancelled);
        }
        if Instant::now() >= self.deadline { Err(Fault::Late) } else { Ok(()) }
    }
}

/// What tells one content of an object from another that had its key: the store's entity tag, without
/// quotes. Some stores give equal contents the same tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version(pub String);

/// An object, as the store lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its key.
    pub key: String,
    /// Bytes.
    pub bytes: u64,
    /// When it was written, by the store's clock; whole seconds in some stores.
    pub modified: SystemTime,
}

/// What the store says of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// Bytes.
    pub bytes: u64,
    /// When it was written, by the store's clock; whole seconds in some stores.
    pub modified: SystemTime,
    /// Where the store tells.
    pub version: Option<Version>,
}

/// An object, or a part of one, as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Read {
    /// What was asked for, or less where the object ends within it.
    pub bytes: Vec<u8>,
    /// Of the whole object, where the store tells.
    pub version: Option<Version>,
}

/// When an object is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When<'a> {
    /// Whether there is one or not.
    Always,
    /// Only where there is none.
    Absent,
    /// Only where it is the one that was read.
    Unchanged(&'a Version),
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Fault {
    /// There is no such object.
    #[error("there is no such object")]
    NotFound,
    /// Of a conditional write: the condition does not hold. Nothing was written.
    #[error("the object is there, or was changed")]
    Condition,
    /// The store does not let us.
    #[error("the store refuses: {0}")]
    Denied(String),
    /// It may work later: the store is busy, a connection failed, an answer was cut off. A write may have
    /// happened.
    #[error("{0}")]
    Transient(String),
    /// The object is longer than was allowed for.
    #[error("the object has more than {0} bytes")]
    TooLong(u64),
    /// No answer in time. A write may have happened, or still happen.
    #[error("no answer in time")]
    Late,
    /// Whoever asked does not want it any more. A write may have happened.
    #[error("cancelled")]
    Cancelled,
    /// The store cannot do that: it is read-only, or knows no conditions.
    #[error("{0}")]
    Unsupported(String),
    /// It will not work later either.
    #[error("{0}")]
    Other(String),
}

impl Fault {
    /// Whether the same may work later.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Transient(_) | Self::Late)
    }
}

/// What a store answers.
pub type Result<T> = std::result::Result<T, Fault>;

/// A store. Calls wait for the answer; any number of threads may call at once. A call is tried once:
/// who wants to try again does.
pub trait Objects: Send + Sync {
    /// What people know it by: its URL, without credentials.
    fn url(&self) -> &str;

    /// Reads an object, or the part of it that is asked for (`part` is not empty), at most `most` bytes.
    ///
    /// # Errors
    /// [`Fault::TooLong`] where it, or the part, is longer.
    fn get(&self, key: &str, part: Option<Range<u64>>, most: u64, until: Until<'_>) -> Result<Read>;

    /// Writes an object, whole or not at all.
    ///
    /// # Errors
    /// [`Fault::Condition`]; [`Fault::Unsupported`] where the store is read-only or cannot keep to `when`.
    fn put(&self, key: &str, bytes: &[u8], when: When<'_>, until: Until<'_>) -> Result<Option<Version>>;

    /// Asks for an object without its content.
    ///
    /// # Errors
    /// [`Fault::NotFound`] and others.
    fn head(&self, key: &str, until: Until<'_>) -> Result<Head>;

    /// Names objects whose keys begin with `prefix` (whole parts of a path: it is empty or ends with `/`),
    /// in any order, until `each` answers false. What is written, replaced or deleted meanwhile may be named
    /// or not. `each` must not call the store.
    ///
    /// # Errors
    /// [`Fault::Unsupported`] where the store cannot list.
    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed) -> bool, until: Until<'_>) -> Result<()>;

    /// Deletes an object. One that is not there is deleted already.
    ///
    /// # Errors
    /// [`Fault::Unsupported`] where the store is read-only.
    fn delete(&self, key: &str, until: Until<'_>) -> Result<()>;

    /// Deletes an object unless it was written again since `version` was read, with the same content or
    /// another.
    ///
    /// # Errors
    /// [`Fault::Condition`]; [`Fault::Unsupported`] without a request if the store has no such deletion.
    fn delete_unchanged(&self, key: &str, version: &Version, until: Until<'_>) -> Result<()> {
        let _ = (key, version, until);
        Err(Fault::Unsupported("the store has no deletion with a condition".to_owned()))
    }

    /// Reads the clock that measures times between requests. It also counts while this host sleeps. A store
    /// with a simulated clock has its own.
    fn uptime(&self) -> Duration {
        crate::rt::uptime()
    }
}
