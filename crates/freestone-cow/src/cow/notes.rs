//! What is noted beside an origin's data: that a merge into it is under way, and of which store;
//! and which content it had when it was closed. With that an origin that is half merged is
//! recognised also by who does not know of the store, and a store that missed writes of its origin
//! is recognised when it is opened.

use std::fmt;
use std::str::FromStr;

/// A place beside an origin's data that outlives the process.
///
/// The order is that of the store's own mark: the store is marked, then the origin, then the first
/// chunk is copied; when all is copied the origin's note goes first. So an origin with a note has a
/// store with a mark.
pub trait Notes: Send + Sync {
    /// The number of the merge that is under way.
    fn merge(&self) -> Option<u64>;
    /// Notes a merge durably, and where its store is, for people. A failure is only logged, since
    /// the store is marked as well. Blocks.
    fn merge_begins(&self, id: u64, store: &str);
    /// Removes that note durably. Returns false if the note may still exist; the store then keeps
    /// its mark, so that opening the store again removes both. Blocks.
    fn merge_ended(&self) -> bool;

    /// How the origin was left when it was used last; `None` where nothing is noted.
    fn left(&self) -> Option<Left> {
        None
    }
    /// Notes durably that the origin is in use: until [`closed`](Self::closed) its content is
    /// unknown. False: that cannot be noted. Blocks.
    fn in_use(&self) -> bool {
        false
    }
    /// Notes durably that the origin was closed in order, and with what content. Blocks.
    fn closed(&self, _content: Stamp) {}
}

/// How an origin was left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// In order.
    Closed {
        /// What it held then.
        content: Stamp,
        /// It was changed by others since.
        changed: bool,
    },
    /// Its user crashed, or still uses it.
    InUse,
}

/// A number for what an origin holds at one moment: another one after every write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Whoever used the origin; drawn at random.
    pub session: u64,
    /// Counts the contents of that session that had to be told apart.
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
