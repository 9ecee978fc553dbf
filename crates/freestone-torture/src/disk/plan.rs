//! How often what goes wrong, and how often it did.

use freestone::device::Op;
use freestone_testkit::Rng;
use serde::{Deserialize, Serialize};

use crate::rt::time::Duration;

/// How often an operation of one kind goes wrong in which way, per mille. Their sum is at most
/// 1000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Chances {
    /// It fails and nothing is done.
    pub fail: u16,
    /// It fails although all of it was done.
    pub fail_done: u16,
    /// It fails, and some of its sectors were done: the first few, or any.
    pub fail_partly: u16,
    /// It begins later; others overtake it.
    pub delay: u16,
    /// It waits until it is released.
    pub hang: u16,
}

/// How often what goes wrong. The default is a disk without faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Plan {
    /// Of reads.
    pub read: Chances,
    /// Of writes.
    pub write: Chances,
    /// Of discards and of writes of zeroes.
    pub clear: Chances,
    /// Of flushes.
    pub flush: Chances,
    /// The longest delay in microseconds, of any operation that is delayed.
    pub delay_max_us: u32,
}

/// What happens to one operation.
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

/// How often a disk did what good disks do not. Each kind of error that it answers is counted here,
/// so an error above it that comes with no count below has no cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Injected {
    /// Failed and did nothing.
    pub failed: u64,
    /// Failed and did all of it.
    pub failed_done: u64,
    /// Failed and did some sectors.
    pub failed_partly: u64,
    /// Began later.
    pub delayed: u64,
    /// Waited to be released.
    pub hung: u64,
    /// Found no room.
    pub no_space: u64,
    /// Reached beyond the end of a disk that shrank.
    pub shrunk: u64,
    /// Were answered "gone", since power was lost or the disk was dropped.
    pub gone: u64,
}

impl Injected {
    /// Operations that were answered with [`Error::Media`](freestone::device::Error::Media).
    pub fn media(&self) -> u64 {
        self.failed + self.failed_done + self.failed_partly + self.shrunk
    }

    /// Operations that were answered with an error.
    pub fn errors(&self) -> u64 {
        self.media() + self.no_space + self.gone
    }
}
