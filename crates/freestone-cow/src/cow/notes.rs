//! Notes beside an origin's data: the merge in progress, and the content at the last orderly close.
//!
//! The notes reveal a half-merged origin even if no user opens the exception store, and a store
//! that missed writes of its origin.

use std::fmt;
use std::str::FromStr;

/// Durable storage for notes beside an origin's data, for example extended attributes.
///
/// A merge first marks the exception store, then writes the origin's note, then copies the first
/// chunk. After the last chunk the origin's note is removed first. So an origin with a note always
/// has a store with a mark.
pub trait Notes: Send + Sync {
    /// Returns the id of the merge in progress, or `None` without a note about a merge.
    fn merge_id(&self) -> Option<u64>;
    /// Records durably that merge `id` is in progress, with the location of its exception store for
    /// messages. A failure is only logged, since the store is marked as well. Blocks.
    fn record_merge(&self, id: u64, store: &str);
    /// Removes the note of a merge durably. Returns false if the note may still exist. The
    /// exception store then keeps its mark, and opening the store again removes both. Blocks.
    fn remove_merge(&self) -> bool;

    /// Returns how the last session left the origin, or `None` without a note.
    fn last_session(&self) -> Option<LastSession> {
        None
    }
    /// Records durably that the origin is in use: its content is unknown until
    /// [`record_close`](Self::record_close). Returns false if the note could not be written. Blocks.
    fn record_in_use(&self) -> bool {
        false
    }
    /// Records durably that the origin was closed in order with the content version `_content`.
    /// Blocks.
    fn record_close(&self, _content: Stamp) {}
}

/// State in which the last session left an origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastSession {
    /// The last session closed the origin in order.
    Closed {
        /// Version of the content at the close.
        content: Stamp,
        /// True if the origin was changed by other programs since the close.
        changed: bool,
    },
    /// The last session crashed, or is still running.
    InUse,
}

/// Version number of an origin's content; every write changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Random number of the session in which this content version began.
    pub session: u64,
    /// Number of the content version within the session.
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
