//! A simulated disk in memory with fault injection.

use std::fmt;
use std::time::Duration;

use freestone_core::device::{Device, Error, Op, forward_device};
use freestone_core::sync::MutexGuard;

use super::engine::{DiskEngine, DiskState};
use super::faulty_model::{Fault, FaultyModel};
use crate::Rng;

/// Time after which [`FaultyDisk::wait_held`] panics.
const HELD_MAX: Duration = Duration::from_secs(20);

/// Selects the operations to which a fault applies. Operations are numbered from 0 in order of arrival since
/// the disk was created. A fault for one kind of operation counts only that kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultSchedule {
    /// The fault applies to all operations.
    Always,
    /// The fault applies to the operation with this number.
    At(u64),
    /// The fault applies to the operation with this number and all later ones.
    From(u64),
}

/// Effect of a fault on an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultEffect {
    /// The operation fails with this error, without effect.
    Fail(Error),
    /// The operation takes effect, but fails with this error.
    FailDone(Error),
    /// A write stores its first half (rounded down to blocks) and fails with [`Error::Media`].
    /// Other operations fail without effect.
    Tear,
    /// The operation is held until [`FaultyDisk::heal`] or [`FaultyDisk::release`], and then takes effect.
    Hang,
    /// The operation starts after this time; later operations may overtake it.
    Delay(Duration),
    /// A read succeeds, but one byte per block is damaged. Other operations are not affected.
    Corrupt,
}

/// Counts of operations since the disk was created. Requests refused as invalid are not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpCounts {
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
    /// Number of discards and of writes of zeroes.
    pub frees: u64,
    /// Length in bytes of the longest operation.
    pub largest: u64,
    /// Number of bytes stored by writes.
    pub bytes_written: u64,
    /// Number of bytes returned by reads.
    pub bytes_read: u64,
    /// Number of operations that are held now.
    pub held: u64,
    /// Number of operations in flight now, including held ones.
    pub in_flight: u64,
    /// Largest number of operations that were in flight at the same time.
    pub in_flight_max: u64,
}

impl OpCounts {
    /// Returns the number of operations of all kinds, which is also the number of the next one.
    pub fn total(&self) -> u64 {
        self.reads + self.writes + self.flushes + self.frees
    }

    pub(super) fn of(&mut self, op: Op) -> &mut u64 {
        match op {
            Op::Read => &mut self.reads,
            Op::Write => &mut self.writes,
            Op::Flush => &mut self.flushes,
            Op::Discard | Op::WriteZeroes => &mut self.frees,
        }
    }
}

/// A simulated disk in memory, to be placed below another device. Tries return "would block"; submitted
/// requests complete on a separate thread. The disk works correctly until [`fault`](Self::fault) and similar
/// calls inject faults; these may be called at any time.
///
/// The disk also checks its user: [`violations`](Self::violations) lists concurrent writes to one
/// block, invalid requests and, if enabled, reads of blocks that were never written.
///
/// Operations that are still held when the device is dropped fail with [`Error::Gone`].
///
/// ```
/// use freestone_core::device::{Blocking, Error, Flags, Op};
/// use freestone_testkit::{FaultyDisk, FaultEffect, FaultSchedule};
///
/// let disk = FaultyDisk::new(1 << 20, 4096);
/// disk.fault(Some(Op::Write), FaultSchedule::At(1), FaultEffect::Fail(Error::Media));
/// assert_eq!(disk.write_at(0, &[1; 4096], Flags::empty()), Ok(()));
/// assert_eq!(disk.write_at(0, &[2; 4096], Flags::empty()), Err(Error::Media));
/// assert_eq!(disk.counts().writes, 2);
/// ```
pub struct FaultyDisk(DiskEngine<FaultyModel>);

// ---- construction and faults --------------------------------------------------------------------

impl FaultyDisk {
    /// Returns a disk of `size` zero bytes.
    ///
    /// # Panics
    /// Panics unless `size` is a multiple of `logical_block`, which must be a power of two from 512 to 4096.
    pub fn new(size: usize, logical_block: u32) -> Self {
        Self(DiskEngine::new(FaultyModel::new(size, logical_block)))
    }

    fn lock(&self) -> MutexGuard<'_, DiskState<FaultyModel>> {
        self.0.shared().lock()
    }

    /// Completes operations in a random order, which depends on the seed and on arrival times.
    #[must_use]
    pub fn shuffled(self, seed: u64) -> Self {
        self.lock().model.shuffle = Some(Rng::new(seed));
        self
    }

    /// Performs one operation at a time, in order of arrival. Each takes the time `each`.
    #[must_use]
    pub fn one_by_one(self, each: Duration) -> Self {
        self.lock().model.service_time = each;
        self
    }

    /// Completes tries on the caller's thread, unless they are held or delayed. Submitted requests still run
    /// on the disk's thread.
    #[must_use]
    pub fn inline(self) -> Self {
        self.lock().model.inline = true;
        self
    }

    /// Reports reads of blocks that were never written as violations.
    #[must_use]
    pub fn strict_reads(self) -> Self {
        self.lock().model.strict_reads = true;
        self
    }

    /// Adds a fault for the operations of kind `op` (`None`: of all kinds) that `schedule` selects. If
    /// several faults match, the one added first applies.
    pub fn fault(&self, op: Option<Op>, schedule: FaultSchedule, effect: FaultEffect) {
        self.lock().model.faults.push(Fault { op, schedule, effect });
    }

    /// Makes writes that reach beyond this byte offset fail with [`Error::NoSpace`], without effect.
    pub fn no_space_from(&self, byte: u64) {
        self.lock().model.no_space_from = Some(byte);
    }

    /// Makes a write fail with [`Error::NoSpace`], without effect, if more than `bytes` would then
    /// have been written in total.
    pub fn no_space_after(&self, bytes: u64) {
        self.lock().model.no_space_after = Some(bytes);
    }

    /// Truncates the disk: operations that reach beyond this byte offset fail with [`Error::Media`]. The
    /// geometry does not change.
    pub fn truncate_at(&self, byte: u64) {
        self.lock().model.truncated_at = Some(byte);
    }

    /// Removes all faults. Held operations take effect and complete.
    pub fn heal(&self) {
        self.lock().model.heal();
        self.0.shared().release(|_| true);
    }

    /// Completes the held operations of one kind, which take effect. The faults stay.
    pub fn release(&self, op: Op) {
        self.0.shared().release(|request| request.op == op);
    }

    // ---- observation ----------------------------------------------------------------------------

    pub fn counts(&self) -> OpCounts {
        let state = self.lock();
        OpCounts { held: state.held() as u64, ..state.model.counts }
    }

    /// Returns descriptions of contract violations by the user of the disk: at most the first 16.
    pub fn violations(&self) -> Vec<String> {
        self.0.shared().violations()
    }

    /// Waits until at least `count` operations are held.
    ///
    /// # Panics
    /// Panics after 20 seconds.
    pub fn wait_held(&self, count: u64) {
        self.0.shared().wait_held(count as usize, HELD_MAX);
    }
}

impl Device for FaultyDisk {
    forward_device!(|disk| disk.0 => geometry, try_io, submit, extents; prefetch: none, zoned: none, changes: none);
}

impl fmt::Debug for FaultyDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultyDisk({:?})", self.counts())
    }
}
