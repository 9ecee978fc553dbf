//! Fault probabilities of a simulated disk, and the counts of injected faults.

use freestone::device::Op;
use freestone_testkit::Rng;
use serde::{Deserialize, Serialize};

use crate::rt::time::Duration;

/// Fault probabilities of one kind of operation, per thousand. Their sum is at most 1000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FaultRates {
    /// The operation fails and does nothing.
    pub fail: u16,
    /// The operation fails although all of it was done.
    pub fail_done: u16,
    /// The operation fails after some of its sectors were done: the first few, or any.
    pub fail_partly: u16,
    /// The operation starts later; other operations overtake it.
    pub delay: u16,
    /// The operation waits until [`DiskControl::release`](super::DiskControl::release).
    pub hang: u16,
}

/// Fault probabilities of a disk, by kind of operation. The default has no faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Plan {
    pub read: FaultRates,
    pub write: FaultRates,
    /// Fault probabilities of discards and of writes of zeroes.
    pub clear: FaultRates,
    pub flush: FaultRates,
    /// Longest delay of a delayed operation, in microseconds.
    pub delay_max_us: u32,
}

/// Fate of one operation: success, or the fault that the disk injects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Well,
    Fail,
    FailDone,
    FailPartly,
    Delay(Duration),
    Hang,
}

impl Plan {
    pub(super) fn draw(&self, op: Op, rng: &mut Rng) -> Fate {
        let chances = match op {
            Op::Read => &self.read,
            Op::Write => &self.write,
            Op::Discard | Op::WriteZeroes => &self.clear,
            Op::Flush => &self.flush,
        };
        if *chances == FaultRates::default() {
            return Fate::Well;
        }
        let mut left = rng.below(1000);
        for (chance, fate) in [
            (chances.fail, Fate::Fail),
            (chances.fail_done, Fate::FailDone),
            (chances.fail_partly, Fate::FailPartly),
            (chances.delay, Fate::Delay(Duration::ZERO)),
            (chances.hang, Fate::Hang),
        ] {
            if left < u64::from(chance) {
                return match fate {
                    Fate::Delay(_) => {
                        Fate::Delay(Duration::from_micros(1 + rng.below(u64::from(self.delay_max_us))))
                    }
                    fate => fate,
                };
            }
            left -= u64::from(chance);
        }
        Fate::Well
    }
}

/// Counts of injected faults. The disk counts each error that it returns. An error of a device
/// above without an increase of a count here has no cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FaultCounts {
    pub failed: u64,
    pub failed_done: u64,
    pub failed_partly: u64,
    pub delayed: u64,
    pub hung: u64,
    /// Number of writes that failed for lack of free space.
    pub no_space: u64,
    /// Number of operations that failed because they reached beyond the end of a disk that shrank.
    pub shrunk: u64,
    /// Number of operations that failed with `Error::Gone` because power was lost or the disk was
    /// dropped.
    pub gone: u64,
}

impl FaultCounts {
    /// Returns the number of operations that failed with
    /// [`Error::Media`](freestone::device::Error::Media).
    pub fn media(&self) -> u64 {
        self.failed + self.failed_done + self.failed_partly + self.shrunk
    }

    pub fn errors(&self) -> u64 {
        self.media() + self.no_space + self.gone
    }
}
