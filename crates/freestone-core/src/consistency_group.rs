//! Consistency groups: snapshots of several devices at one point in time.
//!
//! If a write completed before another one was submitted, a group of snapshots never contains the second
//! without the first, on whatever devices of the group they are. Everything that can fail or take long (a COW
//! store on a disk, memory) happens earlier, when the [`Pending`] snapshot is created.
//!
//! # Concurrent groups
//! Groups are frozen concurrently, and each one blocks only the devices that it freezes. If devices are
//! stacked, two groups could deadlock: P lies on R and S on Q; one group freezes Q and then waits for P, the
//! other freezes R and then waits for S.
//!
//! Therefore a group with frozen devices waits only for a short time; then it thaws them all, pauses and
//! starts again. The oldest group never backs off, so one group always makes progress.
//!
//! A group does not back off at its first device either, because it has frozen only that one. A cycle in
//! which only one group waits with other devices frozen would need one of them below the device that it waits
//! for, and the order of [`take`] excludes that. So every cycle has two groups with frozen devices, at least
//! one of which is not the oldest.
//!
//! If a disk hangs, every group stops waiting after [`FREEZE_MAX`].

use std::collections::BTreeSet;
use std::time::Duration;

use crate::sync::{Instant, Mutex, MutexGuard, thread};
use thiserror::Error;

/// Maximum time to freeze all origins of a group, that is for their writes in flight to complete.
pub const FREEZE_MAX: Duration = Duration::from_secs(10);
/// Time that a group waits with devices frozen at its first attempt, if an older group exists.
const HOLD_FIRST: Duration = Duration::from_millis(50);
/// Upper limit of that time, which doubles with each attempt.
const HOLD_MAX: Duration = Duration::from_secs(1);

/// Error: writes to the origin were still in flight at the deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "could not be frozen: writes in flight did not complete within {} s; nothing was changed",
    FREEZE_MAX.as_secs()
)]
pub struct NotInTime;

/// Error: an origin of a group could not be frozen in time ([`NotInTime`]). No snapshot was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{NotInTime}")]
pub struct Late {
    /// Index of that origin in the slice passed to [`take`].
    pub at: usize,
}

/// A snapshot that is prepared and not yet taken.
pub trait Pending: Send {
    /// Returns true if [`freeze`](Self::freeze) may have to wait for a disk.
    fn waits_for_disk(&self) -> bool {
        false
    }
    /// Blocks new writes to the origin until [`thaw`](Self::thaw), and waits for the writes in flight.
    ///
    /// # Errors
    /// Writes were still in flight at `until`. New writes are no longer blocked.
    fn freeze(&mut self, until: Instant) -> Result<(), NotInTime>;
    /// Takes the snapshot of the origin's present content. Called once, while the origin is frozen.
    fn attach(&mut self);
    /// Unblocks writes.
    fn thaw(&mut self);
}

/// Takes all snapshots at one point in time. Writes to the origins are blocked meanwhile.
///
/// Origins that may wait for a disk are frozen first, in the order of the slice: if one origin lies on
/// another, the caller must put the upper one first. Origins in memory follow, so that they are frozen for
/// the shortest time, and because other origins may lie on them.
///
/// # Errors
/// An origin could not be frozen within [`FREEZE_MAX`]. No snapshot is taken, and writes are unblocked.
pub fn take(pending: &mut [&mut dyn Pending]) -> Result<(), Late> {
    let mut order: Vec<usize> = (0..pending.len()).collect();
    order.sort_by_key(|&at| !pending[at].waits_for_disk());
    freeze_all(pending, &order, Instant::now() + FREEZE_MAX)?;
    for &at in &order {
        pending[at].attach();
    }
    for &at in &order {
        pending[at].thaw();
    }
    Ok(())
}

/// Freezes all origins, or none.
fn freeze_all(pending: &mut [&mut dyn Pending], order: &[usize], deadline: Instant) -> Result<(), Late> {
    // A single snapshot freezes only one device, so it needs no order among groups.
    let ticket = (order.len() > 1).then(GroupTicket::register);
    let mut hold = HOLD_FIRST;
    loop {
        let failed = order.iter().enumerate().position(|(frozen, &at)| {
            let backs_off = frozen > 0 && ticket.as_ref().is_some_and(|ticket| !ticket.is_oldest());
            let until = if backs_off { deadline.min(Instant::now() + hold) } else { deadline };
            pending[at].freeze(until).is_err()
        });
        let Some(failed) = failed else { return Ok(()) };
        for &at in order[..failed].iter().rev() {
            pending[at].thaw();
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Late { at: order[failed] });
        }
        // Other groups make progress meanwhile.
        thread::sleep(hold.min(left));
        hold = (hold * 2).min(HOLD_MAX);
    }
}

/// Number of a group of several snapshots that is being frozen. Unregisters the group on drop.
struct GroupTicket(u64);

/// Groups that are being frozen. Innermost lock.
static GROUPS: Mutex<FreezingGroups> = Mutex::new(FreezingGroups { next: 0, freezing: BTreeSet::new() });

struct FreezingGroups {
    next: u64,
    freezing: BTreeSet<u64>,
}

impl GroupTicket {
    fn register() -> Self {
        let mut groups = lock();
        let number = groups.next;
        groups.next += 1;
        groups.freezing.insert(number);
        Self(number)
    }

    fn is_oldest(&self) -> bool {
        lock().freezing.first() == Some(&self.0)
    }
}

impl Drop for GroupTicket {
    fn drop(&mut self) {
        lock().freezing.remove(&self.0);
    }
}

fn lock() -> MutexGuard<'static, FreezingGroups> {
    GROUPS.lock()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier, Condvar, Mutex};
    use std::time::{Duration, Instant};

    use super::{FREEZE_MAX, Late, NotInTime, Pending, take};

    #[derive(Default)]
    struct Devices {
        frozen: Mutex<[u32; 4]>,
        changed: Condvar,
    }

    /// A snapshot of a device that lies on another one (`needs`), whose freezing blocks its writes.
    struct FakeSnapshot<'a> {
        devices: &'a Devices,
        device: usize,
        needs: Option<usize>,
        /// Passed when both groups have frozen their first device.
        met: Option<Arc<Barrier>>,
        attached: bool,
    }

    impl Pending for FakeSnapshot<'_> {
        fn freeze(&mut self, until: Instant) -> Result<(), NotInTime> {
            if let Some(met) = self.met.take() {
                met.wait();
            }
            let mut frozen = self.devices.frozen.lock().unwrap();
            frozen[self.device] += 1;
            while self.needs.is_some_and(|below| frozen[below] > 0) {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    frozen[self.device] -= 1;
                    self.devices.changed.notify_all();
                    return Err(NotInTime);
                }
                frozen = self.devices.changed.wait_timeout(frozen, left).unwrap().0;
            }
            Ok(())
        }

        fn attach(&mut self) {
            self.attached = true;
        }

        fn thaw(&mut self) {
            self.devices.frozen.lock().unwrap()[self.device] -= 1;
            self.devices.changed.notify_all();
        }
    }

    #[test]
    fn groups_that_block_each_other_make_progress() {
        let [p, q, r, s] = [0, 1, 2, 3];
        for _ in 0..20 {
            let devices = Devices::default();
            // p lies on r and s on q.
            let met = Arc::new(Barrier::new(2));
            let freeze_group = |first, then, below| {
                let snapshot = |device, needs, met| FakeSnapshot {
                    devices: &devices,
                    device,
                    needs,
                    met,
                    attached: false,
                };
                let (mut held, mut next) =
                    (snapshot(first, None, None), snapshot(then, Some(below), Some(Arc::clone(&met))));
                let begun = Instant::now();
                take(&mut [&mut held, &mut next]).unwrap();
                assert!(begun.elapsed() < FREEZE_MAX, "groups waited for the deadline");
                assert!(held.attached && next.attached);
            };
            std::thread::scope(|scope| {
                scope.spawn(|| freeze_group(q, p, r));
                scope.spawn(|| freeze_group(r, s, q));
            });
            assert_eq!(*devices.frozen.lock().unwrap(), [0; 4]);
        }
    }

    #[test]
    fn freeze_timeout_names_origin_and_blocks_no_other_group() {
        let devices = Devices::default();
        // Device 3 stays frozen, so writes to device 1 never complete.
        devices.frozen.lock().unwrap()[3] = 1;
        let snapshot =
            |device, needs| FakeSnapshot { devices: &devices, device, needs, met: None, attached: false };
        std::thread::scope(|scope| {
            let late = scope.spawn(|| {
                let (mut a, mut b) = (snapshot(0, None), snapshot(1, Some(3)));
                let outcome = take(&mut [&mut a, &mut b]);
                assert!(!a.attached && !b.attached);
                outcome
            });
            let mut others = 0;
            while !late.is_finished() {
                let (mut a, mut b) = (snapshot(2, None), snapshot(2, None));
                take(&mut [&mut a, &mut b]).unwrap();
                others += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(others > 100, "{others}");
            assert_eq!(late.join().unwrap(), Err(Late { at: 1 }));
        });
        assert_eq!(*devices.frozen.lock().unwrap(), [0, 0, 0, 1]);
    }
}
