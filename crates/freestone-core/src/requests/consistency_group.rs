//! Consistency groups: snapshots of several devices at one point in time.
//!
//! If a write completed before another one was submitted, a group of snapshots never contains the second
//! without the first, on whatever devices of the group they are. Everything that can fail or take long (a COW
//! store on a disk, memory) happens earlier, when the [`GroupMember`] snapshot is created.
//!
//! # Concurrent groups
//! Groups are frozen concurrently, and each group blocks only the devices that it freezes. If devices are
//! stacked, two groups could deadlock. Example: P is stacked on R, and S on Q. A first group freezes Q and
//! then waits for P, a second group freezes R and then waits for S.
//!
//! Therefore a group with frozen devices waits only for a short time; then it thaws them all, pauses and
//! starts again. The oldest group never backs off, so one group always makes progress.
//!
//! A group does not back off at its first device either, because it has frozen only that one. A cycle in
//! which only one group waits with other devices frozen would need a frozen device under the device that the
//! group waits for. The order of [`take_snapshots`] excludes this. So every cycle has two groups with frozen
//! devices, at least one of which is not the oldest.
//!
//! If a disk hangs, every group stops waiting after [`FREEZE_MAX`].

use std::collections::BTreeSet;
use std::time::Duration;

use crate::sync::{Instant, Mutex, thread};
use thiserror::Error;

/// Maximum time to freeze all origins of a group, that is, to wait for their writes in flight.
pub const FREEZE_MAX: Duration = Duration::from_secs(10);
/// Maximum time that a group waits with devices frozen at its first attempt, if an older group exists.
const HOLD_FIRST: Duration = Duration::from_millis(50);
/// Upper limit of the time that a group waits with devices frozen. The time doubles with each attempt.
const HOLD_MAX: Duration = Duration::from_secs(1);

/// Error from freezing an origin: writes to the origin were still in flight at the deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "could not be frozen: writes in flight did not complete within {} s; nothing was changed",
    FREEZE_MAX.as_secs()
)]
pub struct FreezeTimeout;

/// Error: an origin of a group could not be frozen in time ([`FreezeTimeout`]). No snapshot was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{FreezeTimeout}")]
pub struct GroupFreezeTimeout {
    /// Index of the origin that could not be frozen, in the slice passed to [`take_snapshots`].
    pub index: usize,
}

/// A snapshot that is prepared and not yet taken.
pub trait GroupMember: Send {
    /// Returns true if [`freeze`](Self::freeze) may have to wait for a disk.
    fn may_wait_for_disk(&self) -> bool {
        false
    }
    /// Blocks new writes to the origin until [`thaw`](Self::thaw), and waits for the writes in flight.
    ///
    /// # Errors
    /// Writes were still in flight at `until`. New writes are no longer blocked.
    fn freeze(&mut self, until: Instant) -> Result<(), FreezeTimeout>;
    /// Takes the snapshot of the origin's present content. Called once, while the origin is frozen.
    fn attach(&mut self);
    /// Unblocks writes to the origin.
    fn thaw(&mut self);
}

/// Takes all snapshots at one point in time. Writes to the origins are blocked meanwhile.
///
/// Origins that may wait for a disk are frozen first, in the order of the slice: if one origin is stacked on
/// another, the caller must put the upper one first. Origins in memory follow, so that they are frozen for
/// the shortest time, and because other origins may be stacked on them.
///
/// # Errors
/// An origin could not be frozen within [`FREEZE_MAX`]. No snapshot is taken, and writes are unblocked.
pub fn take_snapshots(pending: &mut [&mut dyn GroupMember]) -> Result<(), GroupFreezeTimeout> {
    take_snapshots_within(FREEZE_MAX, pending)
}

/// Takes all snapshots, or none if an origin cannot be frozen within `limit`.
fn take_snapshots_within(
    limit: Duration,
    pending: &mut [&mut dyn GroupMember],
) -> Result<(), GroupFreezeTimeout> {
    let mut order: Vec<usize> = (0..pending.len()).collect();
    order.sort_by_key(|&at| !pending[at].may_wait_for_disk());
    freeze_all(pending, &order, Instant::now() + limit)?;
    for &at in &order {
        pending[at].attach();
    }
    for &at in &order {
        pending[at].thaw();
    }
    Ok(())
}

/// Freezes all origins in the given order, or none if one cannot be frozen before the deadline.
fn freeze_all(
    pending: &mut [&mut dyn GroupMember],
    order: &[usize],
    deadline: Instant,
) -> Result<(), GroupFreezeTimeout> {
    // A single snapshot freezes only one device, so it cannot deadlock with groups and needs no ticket.
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
            return Err(GroupFreezeTimeout { index: order[failed] });
        }
        // During this pause no device is frozen, so other groups make progress.
        thread::sleep(hold.min(left));
        hold = (hold * 2).min(HOLD_MAX);
    }
}

/// Number of a group of several snapshots that is being frozen; an older group has a lower number.
/// Unregisters the group on drop.
struct GroupTicket(u64);

/// Numbers of the groups that are being frozen. Innermost lock.
static GROUPS: Mutex<FreezingGroups> = Mutex::new(FreezingGroups { next: 0, freezing: BTreeSet::new() });

struct FreezingGroups {
    next: u64,
    freezing: BTreeSet<u64>,
}

impl GroupTicket {
    fn register() -> Self {
        let mut groups = GROUPS.lock();
        let number = groups.next;
        groups.next += 1;
        groups.freezing.insert(number);
        Self(number)
    }

    fn is_oldest(&self) -> bool {
        GROUPS.lock().freezing.first() == Some(&self.0)
    }
}

impl Drop for GroupTicket {
    fn drop(&mut self) {
        GROUPS.lock().freezing.remove(&self.0);
    }
}

#[cfg(all(test, not(freestone_sim)))]
mod tests {
    use std::sync::{Arc, Barrier, Condvar, Mutex};
    use std::time::{Duration, Instant};

    use super::{
        FREEZE_MAX, FreezeTimeout, GroupFreezeTimeout, GroupMember, take_snapshots, take_snapshots_within,
    };

    #[derive(Default)]
    struct Devices {
        frozen: Mutex<[u32; 4]>,
        changed: Condvar,
    }

    /// A fake snapshot of a device that may be stacked on another device (`needs`). While that device is
    /// frozen, writes in flight of the upper one do not complete.
    struct FakeSnapshot<'a> {
        devices: &'a Devices,
        device: usize,
        needs: Option<usize>,
        /// Barrier that both groups pass when each has frozen its first device.
        met: Option<Arc<Barrier>>,
        attached: bool,
    }

    impl GroupMember for FakeSnapshot<'_> {
        fn freeze(&mut self, until: Instant) -> Result<(), FreezeTimeout> {
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
                    return Err(FreezeTimeout);
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
            // Device p is stacked on r, and s on q.
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
                take_snapshots(&mut [&mut held, &mut next]).unwrap();
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
        const LIMIT: Duration = Duration::from_secs(2);
        let devices = Devices::default();
        // Device 3 stays frozen, so writes to device 1 never complete.
        devices.frozen.lock().unwrap()[3] = 1;
        let snapshot =
            |device, needs| FakeSnapshot { devices: &devices, device, needs, met: None, attached: false };
        std::thread::scope(|scope| {
            let late = scope.spawn(|| {
                let (mut a, mut b) = (snapshot(0, None), snapshot(1, Some(3)));
                let begun = Instant::now();
                let outcome = take_snapshots_within(LIMIT, &mut [&mut a, &mut b]);
                assert!(begun.elapsed() >= LIMIT);
                assert!(!a.attached && !b.attached);
                outcome
            });
            let mut others = 0;
            while !late.is_finished() {
                let (mut a, mut b) = (snapshot(2, None), snapshot(2, None));
                take_snapshots(&mut [&mut a, &mut b]).unwrap();
                others += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(others > 20, "{others}");
            assert_eq!(late.join().unwrap(), Err(GroupFreezeTimeout { index: 1 }));
        });
        assert_eq!(*devices.frozen.lock().unwrap(), [0, 0, 0, 1]);
    }
}
