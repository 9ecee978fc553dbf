//! Results of evictions, and the decision whether to run another eviction round.

use thiserror::Error;

use freestone_core::clock::now_ms;
use freestone_core::device;

/// Number of successive rounds without an error that free no memory, after which waiting requests
/// fail.
const EMPTY_ROUNDS_MAX: u32 = 16;
/// Number of successive failed rounds that free no memory, after which evictions pause for
/// `RETRY_MS`.
const FAILURES_MAX: u32 = 3;
/// Pause of evictions after [`FAILURES_MAX`] failures, in milliseconds.
const RETRY_MS: u64 = 1000;

/// Result of a writeback.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WritebackReport {
    /// Number of pages that moved from memory to the backing device.
    pub pages: u64,
    /// Number of 4 KiB blocks written, including those of pages that were changed meanwhile and
    /// stay in memory.
    pub blocks: u64,
}

/// Reasons for an early end of a writeback. Pages already written stay on the backing device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum WritebackError {
    /// The family (devices that share a memory pool) has no backing device; ENODEV in the kernel.
    #[error("has no backing_dev; set backing_dev when the device is created")]
    NoBacking,
    /// A page is beyond the end of the device, or the range ends before it begins; ERANGE.
    #[error("pages {first}-{last}: out of range; the device has the pages 0-{end}")]
    Range {
        /// First page of the requested range.
        first: u64,
        /// Last page of the requested range.
        last: u64,
        /// Last page of the device.
        end: u64,
    },
    /// The writeback budget (`writeback_limit`) is used up; EIO, as in the kernel.
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

/// Results of recent evictions for one memory limit: that of the family or a device's own.
#[derive(Default)]
pub(in crate::ram) struct EvictionHistory {
    /// Number of successive rounds without an error that freed no memory.
    empty: u32,
    /// Number of successive failed rounds, and the time of the last failure in milliseconds.
    failures: u32,
    failed_ms: u64,
}

pub(in crate::ram) struct EvictionRound {
    /// Bytes of pool memory of the objects that the round picked.
    pub taken: u64,
    pub freed: u64,
    pub outcome: Result<(), WritebackError>,
}

impl EvictionHistory {
    /// Returns true if the backing device failed repeatedly within the last second: requests must
    /// not wait for evictions.
    pub fn is_paused(&self) -> bool {
        self.failures >= FAILURES_MAX && now_ms() - self.failed_ms < RETRY_MS
    }

    /// Records the result of a round. `progressed`: memory was freed. `silent`: the backing device
    /// hangs. Returns true if another round makes sense.
    pub fn record_round(&mut self, spilled: &EvictionRound, progressed: bool, silent: bool) -> bool {
        let failed = matches!(spilled.outcome, Err(WritebackError::Device(_)));
        (self.failures, self.failed_ms) = if failed && !progressed {
            (if silent { FAILURES_MAX } else { self.failures + 1 }, now_ms())
        } else {
            (0, 0)
        };
        // Try again after a failure, as it may concern one place on the backing device only. Try
        // again after an empty round, as its picked pages may have changed meanwhile.
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
