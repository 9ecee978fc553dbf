//! What spilling came to, and whether another round of it makes sense.

use thiserror::Error;

use crate::clock::now_ms;
use freestone_core::device;

/// Rounds in a row that free nothing, although nothing fails, before requests that wait are
/// refused.
const EMPTY_ROUNDS_MAX: u32 = 16;
/// Rounds in a row that failed and freed nothing, after which the device is not asked for every
/// request.
const FAILURES_MAX: u32 = 3;
/// Then nothing is tried for so long.
const RETRY_MS: u64 = 1000;

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Written {
    /// Pages that left memory.
    pub pages: u64,
    /// Blocks of 4 KiB that were written, also for pages that were touched meanwhile.
    pub blocks: u64,
}

/// Why a writeback ended early. What was written until then stays written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum WritebackError {
    /// No backing device: the kernel's ENODEV.
    #[error("has no backing_dev; it is given when the device is made")]
    NoBacking,
    /// A page beyond the end, or a range that ends before it begins: ERANGE.
    #[error("pages {first}-{last}: out of range; the device has the pages 0-{end}")]
    Range {
        /// As asked.
        first: u64,
        /// As asked.
        last: u64,
        /// The last page there is.
        end: u64,
    },
    /// The budget is used up: EIO, as in the kernel.
    #[error("writeback_limit is used up")]
    Limit,
    /// The backing device has no room: ENOSPC.
    #[error("backing_dev is full")]
    NoSpace,
    /// The backing device failed, or did not answer in time: EIO. Pages that could not be written
    /// stay in memory.
    #[error("backing_dev: {0}")]
    Device(device::Error),
    /// Who watches it had it stop.
    #[error("it was cancelled")]
    Cancelled,
}

/// How evictions for one limit went so far: the family's, or a device's own.
#[derive(Default)]
pub(super) struct EvictionHistory {
    /// How many in a row found nothing to spill.
    empty: u32,
    /// How many in a row failed, and when the last one did.
    failures: u32,
    failed_ms: u64,
}

/// What a round came to.
pub(super) struct Evicted {
    /// Bytes of objects that were taken on.
    pub taken: u64,
    /// Pages that left memory.
    pub freed: u64,
    pub outcome: Result<(), WritebackError>,
}

impl EvictionHistory {
    /// Whether the device failed so often just now that it is not to be asked for every request.
    pub fn pause(&self) -> bool {
        self.failures >= FAILURES_MAX && now_ms() - self.failed_ms < RETRY_MS
    }

    /// Counts a round. Returns whether another one makes sense.
    pub fn after(&mut self, spilled: &Evicted, got_on: bool, silent: bool) -> bool {
        let failed = matches!(spilled.outcome, Err(WritebackError::Device(_)));
        (self.failures, self.failed_ms) = if failed && !got_on {
            (if silent { FAILURES_MAX } else { self.failures + 1 }, now_ms())
        } else {
            (0, 0)
        };
        // One failure may be of one place only; and what was taken on may have been changed
        // meanwhile.
        let again = match spilled.outcome {
            Ok(()) => {
                self.empty = if got_on { 0 } else { self.empty + 1 };
                self.empty < EMPTY_ROUNDS_MAX
            }
            Err(WritebackError::Device(_)) => self.failures < FAILURES_MAX,
            Err(_) => false,
        };
        if !got_on && !again {
            self.empty = 0;
        }
        again
    }
}
