//! Results of recompressing pages, and when to compact a pool that is at its memory limit.

use crate::pool::class::CLASSES;
use crate::ram::geometry::PAGE;
use crate::ram::memory::pages::Pages;

/// Number of successive pages that the memory limit must refuse before
/// [`RecompressSpace::is_exhausted`] returns true.
const REFUSALS_MAX: u32 = 4096;
/// Upper limit of `compact_after`, and the minimum of saved bytes for an automatic compaction.
/// `compact_after` doubles with each compaction, from one page on, as the space freed by one page
/// may hold the next two objects.
const COMPACT_AFTER_BYTES: u64 = 1 << 20;
/// An automatic compaction needs at least 1/`COMPACT_SHARE` of the pool's bytes saved.
const COMPACT_SHARE: u64 = 64;

/// Result of recompressing one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    /// Nothing was compressed: the page is not selected any more.
    Skipped,
    Shrunk {
        from: usize,
        to: usize,
    },
    Failed,
    FailedForGood,
    /// The memory limit leaves no space for the smaller object.
    NoSpace,
    Reset,
}

/// Compaction of the pool after a background pass, one size class at a time. The objects that the
/// pass freed are scattered over the pool's pages.
#[derive(Default)]
pub(super) struct ClassCompaction {
    /// Number of size classes that are left to compact.
    left: usize,
}

impl ClassCompaction {
    pub fn start(&mut self) {
        self.left = CLASSES;
    }

    /// Compacts the next classes until `go_on` returns false. Returns true if none is left.
    pub fn run(&mut self, pages: &Pages, go_on: impl Fn() -> bool) -> bool {
        while self.left > 0 {
            self.left -= 1;
            pages.compact_class(self.left);
            if !go_on() {
                return false;
            }
        }
        true
    }
}

/// Accounting of freed space in a pool that is at its memory limit, to decide when to compact.
#[derive(Default)]
pub(super) struct RecompressSpace {
    /// Bytes that must be freed since the last compaction before the next is worthwhile.
    compact_after: u64,
    /// Bytes of the objects replaced since the last compaction, and how much smaller their new
    /// objects are in total.
    freed_since: u64,
    saved_since: u64,
    refused_in_a_row: u32,
}

impl RecompressSpace {
    /// Returns true if enough bytes were freed for a compaction to free pages. The caller must then
    /// compact, as the counts restart.
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
            Attempt::NoSpace => self.refused_in_a_row += 1,
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

    /// Resets the refusals, so that refused pages can be retried.
    pub fn reset_refusals(&mut self) {
        (self.refused_in_a_row, self.compact_after) = (0, 0);
    }

    /// Returns true if the bytes saved since the last compaction justify compacting a pool of
    /// `pool_bytes`.
    pub fn is_compaction_due(&self, pool_bytes: u64) -> bool {
        self.saved_since >= COMPACT_AFTER_BYTES.max(pool_bytes / COMPACT_SHARE)
    }
}
