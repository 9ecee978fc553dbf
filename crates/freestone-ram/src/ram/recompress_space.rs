//! Results of recompressing pages, and when to compact a pool that is at its limit.

use super::PAGE;

/// Successive pages refused by the memory limit before [`RecompressSpace::is_exhausted`].
const REFUSALS_MAX: u32 = 4096;
/// Maximum bytes that must be freed before the next compaction, and minimum bytes saved for an
/// automatic one. The first threshold doubles from one page on: the space freed by one page may hold
/// the next two objects.
const COMPACT_AFTER_BYTES: u64 = 1 << 20;
/// Automatic compaction needs freed bytes of at least pool size / `COMPACT_SHARE`.
const COMPACT_SHARE: u64 = 64;

/// Result of recompressing one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    /// The page is not selected any more, or was accessed meanwhile.
    Skipped,
    Shrunk {
        from: usize,
        to: usize,
    },
    Failed,
    FailedForGood,
    /// The limit leaves no space for the smaller object.
    NoRoom,
    Reset,
}

/// Accounting of freed space in a pool that is at its limit.
#[derive(Default)]
pub(super) struct RecompressSpace {
    /// Bytes that must be freed before the next compaction.
    compact_after: u64,
    /// Bytes of replaced objects since the last compaction, and the part of them that new objects
    /// do not use.
    freed_since: u64,
    saved_since: u64,
    refused_in_a_row: u32,
}

impl RecompressSpace {
    /// Returns true if enough was freed for a compaction to gain pages. The caller must then
    /// compact.
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
            Attempt::Skipped | Attempt::Failed | Attempt::FailedForGood | Attempt::Reset => {}
        }
    }

    pub fn is_exhausted(&self) -> bool {
        self.refused_in_a_row >= REFUSALS_MAX
    }

    /// Resets the refusals, for another attempt when space may be free.
    pub fn reset_refusals(&mut self) {
        (self.refused_in_a_row, self.compact_after) = (0, 0);
    }

    /// Returns true if the bytes saved since the last compaction justify compacting a pool of
    /// `pool_bytes`.
    pub fn is_compaction_due(&self, pool_bytes: u64) -> bool {
        self.saved_since >= COMPACT_AFTER_BYTES.max(pool_bytes / COMPACT_SHARE)
    }
}
