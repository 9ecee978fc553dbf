//! Results of evictions, and the decision to run another round.

use thiserror::Error;

use crate::clock::now_ms;
use freestone_core::device;

/// Successive rounds that neither fail nor free memory before waiting requests fail.
const EMPTY_ROUNDS_MAX: u32 = 16;
/// Successive failed rounds that freed nothing, after which requests no longer retry the device.
const FAILURES_MAX: u32 = 3;
/// Pause after [`FAILURES_MAX`] failures, in milliseconds.
const RETRY_MS: u64 = 1000;

/// Result of a writeback.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Written {
    /// Pages that left memory.
    pub pages: u64,
    /// Blocks of 4 KiB written, including those of pages accessed meanwhile.
    pub blocks: u64,
}

/// Reasons for an early end of a writeback. Pages already written stay on the backing device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum WritebackError {
    /// The family has no backing device; the kernel's ENODEV.
    #[error("has no backing_dev; set backing_dev when the device is created")]
    NoBacking,
    /// A page is beyond the end, or the range ends before it begins; ERANGE.
    #[error("pages {first}-{last}: out of range; the device has the pages 0-{end}")]
    Range {
        /// First page of the request.
        first: u64,
        /// Last page of the request.
        last: u64,
        /// Last page of the device.
        end: u64,
    },
    /// The writeback budget is used up; EIO, as in the kernel.
    #[error("writeback_limit is used up")]
    Limit,
    /// The backing device is full; ENOSPC.
    #[error("backing_dev is full")]
    NoSpace,
    /// The backing device failed or timed out; EIO. Pages that could not be written stay in memory.
    #[error("backing_dev: {0}")]
    Device(device::Error),
    /// The caller cancelled the writeback.
    #[error("the operation was cancelled")]
    Cancelled,
}

/// Results of recent evictions for one limit: the family's or a device's own.
#[derive(Default)]
pub(super) struct EvictionHistory {
    /// Successive rounds that evicted nothing.
    empty: u32,
    /// Successive failed rounds, and the time of the last failure.
    failures: u32,
    failed_ms: u64,
}

/// Result of an eviction round.
pub(super) struct Evicted {
    /// Bytes of the objects that the round picked.
    pub taken: u64,
    pub freed: u64,
    pub outcome: Result<(), WritebackError>,
}

impl EvictionHistory {
    /// Returns true if the device failed repeatedly just now, and requests must not retry it.
    pub fn is_paused(&self) -> bool {
        self.failures >= FAILURES_MAX && now_ms() - self.failed_ms < RETRY_MS
    }

    /// Records a round. Returns true if another round makes sense.
    pub fn record_round(&mut self, spilled: &Evicted, progressed: bool, silent: bool) -> bool {
        let failed = matches!(spilled.outcome, Err(WritebackError::Device(_)));
        (self.failures, self.failed_ms) = if failed && !progressed {
            (if silent { FAILURES_MAX } else { self.failures + 1 }, now_ms())
        } else {
            (0, 0)
        };
        // A failure may concern one place on the device only, and picked pages may have changed
        // meanwhile: try again.
        let again = match spilled.outcome {
            Ok(()) => {
                self.empty = if progressed { 0 } else { self.empty + 1 };
                self.empty < EMPTY_ROUNDS_MAX
            }
            Err(WritebackError::Device(_)) => self.failures < FAILURES_MAX,
            Err(_) => false,
        };
        if !progressed && !again {
            self.empty = 0;
        }
        again
    }
}
