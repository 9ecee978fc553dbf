//! What attempts to compress pages again came to, and room for that in a pool that is at its limit.

use super::PAGE;

/// Pages in a row that find no room below the memory limit before those that found none are tried
/// again.
const REFUSALS_MAX: u32 = 4096;
/// So much must have been freed before the pool is compacted again; to make room under the limit at
/// first less, from a page on: what one page frees may be room for the next two.
const COMPACT_AFTER_BYTES: u64 = 1 << 20;
/// By itself the pool is packed when also this share of it was freed.
const COMPACT_SHARE: u64 = 64;

/// What came of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    /// Not wanted any more, or touched meanwhile.
    Left,
    /// The object had `from` bytes and has `to`.
    Shrunk {
        from: usize,
        to: usize,
    },
    Failed,
    FailedForGood,
    /// The limit leaves no room for the smaller object.
    NoRoom,
    /// The disk was reset.
    Reset,
}

/// Room for smaller objects in a pool that is at its limit.
#[derive(Default)]
pub(super) struct Room {
    /// So much must have been freed before the pool is compacted again.
    compact_after: u64,
    /// Bytes of old objects since the last compaction, and how much of that is not used by new
    /// ones.
    freed_since: u64,
    saved_since: u64,
    refused_in_a_row: u32,
}

impl Room {
    /// Whether it is worth trying to turn places that were freed into pages; who asks tries it
    /// then.
    pub fn is_worth_compacting(&mut self) -> bool {
        if self.freed_since < self.compact_after {
            return false;
        }
        self.compact_after = (self.compact_after * 2).clamp(PAGE, COMPACT_AFTER_BYTES);
        (self.freed_since, self.saved_since) = (0, 0);
        true
    }

    pub fn count(&mut self, attempt: Attempt) {
        match attempt {
            Attempt::NoRoom => self.refused_in_a_row += 1,
            Attempt::Shrunk { from, to } => {
                self.refused_in_a_row = 0;
                self.freed_since += from as u64;
                self.saved_since += (from - to) as u64;
            }
            Attempt::Left | Attempt::Failed | Attempt::FailedForGood | Attempt::Reset => {}
        }
    }

    pub fn is_hopeless(&self) -> bool {
        self.refused_in_a_row >= REFUSALS_MAX
    }

    /// Another try: later there may be room.
    pub fn hope(&mut self) {
        (self.refused_in_a_row, self.compact_after) = (0, 0);
    }

    /// Whether packing a pool of so many bytes gains enough by what was freed since it was last
    /// done.
    pub fn is_compaction_due(&self, pool_bytes: u64) -> bool {
        self.saved_since >= COMPACT_AFTER_BYTES.max(pool_bytes / COMPACT_SHARE)
    }
}
