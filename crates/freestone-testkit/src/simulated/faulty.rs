//! A simulated disk in memory with fault injection.

use std::fmt;
use std::time::Duration;

use freestone_core::device::{Device, Op, forward_device};
use freestone_core::sync::MutexGuard;

use super::engine::{DiskEngine, DiskState};
use super::faulty_model::{Fault, FaultEffect, FaultSchedule, FaultyModel, OpCounts};
use crate::Rng;

/// Time after which [`FaultyDisk::wait_held`] panics.
const HELD_MAX: Duration = Duration::from_secs(20);

/// A simulated disk in memory, to be placed below another device. Tries return "would block"; submitted
/// requests complete on a separate thread. The disk works correctly until [`fault`](Self::fault) and similar
/// calls inject faults; these may be called at any time.
///
/// The disk also checks its user: [`violations`](Self::violations) lists concurrent writes to one
/// block, invalid requests and, if enabled, reads of blocks that were never written.
///
/// Operations that are still held when the device is dropped fail with [`Gone`](freestone_core::device::Error::Gone).
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

    /// Makes writes that reach beyond this byte offset fail with [`NoSpace`](freestone_core::device::Error::NoSpace), without effect.
    pub fn no_space_from(&self, byte: u64) {
        self.lock().model.no_space_from = Some(byte);
    }

    /// Makes a write fail with [`NoSpace`](freestone_core::device::Error::NoSpace), without effect, if more than `bytes` would then
    /// have been written in total.
    pub fn no_space_after(&self, bytes: u64) {
        self.lock().model.no_space_after = Some(bytes);
    }

    /// Truncates the disk: operations that reach beyond this byte offset fail with [`Media`](freestone_core::device::Error::Media). The
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
