//! Notes beside an origin's data: the merge in progress, and the content at the last orderly close.
//!
//! The notes reveal a half-merged origin even if nobody opens the store. They also reveal a store
//! that missed writes of its origin.

use std::fmt;
use std::str::FromStr;

/// Durable storage for notes beside an origin's data, for example extended attributes.
///
/// A merge marks the store first, then the origin, then copies the first chunk. After the last
/// chunk the origin's note is removed first. So an origin with a note always has a store with a
/// mark.
pub trait Notes: Send + Sync {
    /// Returns the id of the merge in progress.
    fn merge(&self) -> Option<u64>;
    /// Records durably that merge `id` is in progress, with the location of its store for messages.
    /// A failure is only logged, since the store is marked as well. Blocks.
    fn merge_begins(&self, id: u64, store: &str);
    /// Removes the note of a merge durably. Returns false if the note may still exist. The store
    /// then keeps its mark, and opening the store again removes both. Blocks.
    fn merge_ended(&self) -> bool;

    /// Returns how the last session left the origin, or `None` without a note.
    fn left(&self) -> Option<Left> {
        None
    }
    /// Records durably that the origin is in use: its content is unknown until
    /// [`closed`](Self::closed). Returns false if the note could not be written. Blocks.
    fn in_use(&self) -> bool {
        false
    }
    /// Records durably that the origin was closed in order while it held `_content`. Blocks.
    fn closed(&self, _content: Stamp) {}
}

/// State in which the last session left an origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// Closed in order.
    Closed {
        /// Content at that time.
        content: Stamp,
        /// Something else changed the origin since.
        changed: bool,
    },
    /// The last session crashed, or is still running.
    InUse,
}

/// Version number of an origin's content; every write changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Random number of the session that used the origin.
    pub session: u64,
    /// Counter of the content versions in this session.
    pub number: u64,
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{:x}", self.session, self.number)
    }
}

impl FromStr for Stamp {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (session, number) = text.split_once('-').unwrap_or((text, ""));
        Ok(Self { session: u64::from_str_radix(session, 16)?, number: u64::from_str_radix(number, 16)? })
    }
}
