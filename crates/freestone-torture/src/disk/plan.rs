//! Fault probabilities of a disk, and the counts of injected faults.

use freestone::device::Op;
use freestone_testkit::Rng;
use serde::{Deserialize, Serialize};

use crate::rt::time::Duration;

/// Fault probabilities of one kind of operation, per mille. Their sum is at most 1000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Chances {
    /// Fails and does nothing.
    pub fail: u16,
    /// Fails although all of it was done.
    pub fail_done: u16,
    /// Fails after some of its sectors were done: the first few, or any.
    pub fail_partly: u16,
    /// Starts later; other requests overtake it.
    pub delay: u16,
    /// Waits until it is released.
    pub hang: u16,
}

/// Fault probabilities of a disk. The default has no faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Plan {
    /// For reads.
    pub read: Chances,
    /// For writes.
    pub write: Chances,
    /// For discards and for writes of zeroes.
    pub clear: Chances,
    /// For flushes.
    pub flush: Chances,
    /// Longest delay in microseconds of a delayed operation.
    pub delay_max_us: u32,
}

/// Fate of one operation.
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
        if *chances == Chances::default() {
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

/// Counts of injected faults. Each kind of error that the disk returns is counted here, so an error
/// above without an increase of a count below has no cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Injected {
    /// Operations that failed and did nothing.
    pub failed: u64,
    /// Operations that failed after doing everything.
    pub failed_done: u64,
    /// Operations that failed after doing some sectors.
    pub failed_partly: u64,
    /// Operations that started later.
    pub delayed: u64,
    /// Operations that waited to be released.
    pub hung: u64,
    /// Writes that found no free space.
    pub no_space: u64,
    /// Operations beyond the end of a disk that shrank.
    pub shrunk: u64,
    /// Operations that failed with "gone" because power was lost or the disk was dropped.
    pub gone: u64,
}

impl Injected {
    /// Returns the number of operations that failed with
    /// [`Error::Media`](freestone::device::Error::Media).
    pub fn media(&self) -> u64 {
        self.failed + self.failed_done + self.failed_partly + self.shrunk
    }

    /// Returns the number of operations that failed.
    pub fn errors(&self) -> u64 {
        self.media() + self.no_space + self.gone
    }
}
