//! One moment for several devices: snapshots that are taken together show all of their origins at
//! one point in time.
//!
//! A write that was answered before another began is in the snapshots if the other is, on whatever
//! device of the set each went. All that can fail or take long (a store on a disk, memory) is done
//! before, in making what implements [`Pending`].
//!
//! # Sets that meet
//! Sets are taken side by side, and one holds up only the devices that it freezes. Two of them
//! could each hold a device that the writes of the other's next one need, where devices lie on one
//! another: P lies on R and S on Q, one set freezes Q and then waits for P, the other freezes R and
//! then waits for S. Therefore a set waits with something frozen only for a moment; then it thaws
//! everything, pauses, and begins again. The oldest set of all does not give way, so one always
//! gets on. At its first device a set holds nothing but that device itself, waits for what lies
//! below it, and need not give way: a ring in which only one set waits with other devices frozen
//! would need one of these below the one that it waits for, which the order of [`take`] excludes.
//! So every ring has two sets that hold something, of which one is not the oldest.
//!
//! Where a disk hangs the wait ends at [`FREEZE_MAX`], for whoever it is.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::sync::{Instant, Mutex, MutexGuard, thread};
use thiserror::Error;

/// How long the origins of a set may take until their writes have ended.
pub const FREEZE_MAX: Duration = Duration::from_secs(10);
/// How long a set waits with something frozen, the first time and at most, while there is an older
/// one.
const HOLD_FIRST: Duration = Duration::from_millis(50);
const HOLD_MAX: Duration = Duration::from_secs(1);

/// Writes to the origin that were under way did not end in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "could not be frozen: writes that are under way did not end within {} s; nothing was changed",
    FREEZE_MAX.as_secs()
)]
pub struct NotInTime;

/// As [`NotInTime`], of a set of which no snapshot has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{NotInTime}")]
pub struct Late {
    /// Whose origin it was: a place in the set, as it was given.
    pub at: usize,
}

/// A snapshot that is ready and has not begun.
pub trait Pending: Send {
    /// Whether [`freeze`](Self::freeze) may have to wait for a disk.
    fn waits_for_disk(&self) -> bool {
        false
    }
    /// Returns when no write to the origin is under way any more; those that come wait until
    /// [`thaw`](Self::thaw).
    ///
    /// # Errors
    /// That was not so at `until`; nothing is held up any more.
    fn freeze(&mut self, until: Instant) -> Result<(), NotInTime>;
    /// The snapshot begins: what the origin holds now is what it shows. Called once, while frozen.
    fn attach(&mut self);
    /// Writes go on.
    fn thaw(&mut self);
}

/// Begins all of these snapshots at one moment. Writers of the origins are held up for as long as
/// it takes. Origins that have to wait for a disk come first, whatever the order here: those in
/// memory are held up for the least time, and can be what others lie on. Of two such origins of
/// which one lies on the other the upper one must be given first.
///
/// # Errors
/// One of the origins could not be frozen within [`FREEZE_MAX`]. No snapshot has begun, and all
/// writers go on.
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

/// Freezes all or none.
fn freeze_all(pending: &mut [&mut dyn Pending], order: &[usize], deadline: Instant) -> Result<(), Late> {
    // One alone never gives way, and nobody has to for it.
    let set = (order.len() > 1).then(Set::begin);
    let mut hold = HOLD_FIRST;
    loop {
        let failed = order.iter().enumerate().position(|(frozen, &at)| {
            let gives_way = frozen > 0 && set.as_ref().is_some_and(|set| !set.is_oldest());
            let until = if gives_way { deadline.min(Instant::now() + hold) } else { deadline };
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
        // The others have to get on meanwhile.
        thread::sleep(hold.min(left));
        hold = (hold * 2).min(HOLD_MAX);
    }
}

/// A set of several that is being frozen, until this is dropped.
struct Set(u64);

/// These sets. Locked for a look or a change.
static SETS: Mutex<Sets> = Mutex::new(Sets { next: 0, freezing: BTreeSet::new() });

struct Sets {
    next: u64,
    freezing: BTreeSet<u64>,
}

impl Set {
    fn begin() -> Self {
        let mut sets = lock();
        let number = sets.next;
        sets.next += 1;
        sets.freezing.insert(number);
        Self(number)
    }

    fn is_oldest(&self) -> bool {
        lock().freezing.first() == Some(&self.0)
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        lock().freezing.remove(&self.0);
    }
}

fn lock() -> MutexGuard<'static, Sets> {
    SETS.lock()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier, Condvar, Mutex};
    use std::time::{Duration, Instant};

    use super::{FREEZE_MAX, Late, NotInTime, Pending, take};

    /// Which devices are frozen, of those that the tests have.
    #[derive(Default)]
    struct World {
        frozen: Mutex<[u32; 4]>,
        changed: Condvar,
    }

    /// A snapshot of a device whose writes need another one, as they do where it lies on that.
    struct One<'a> {
        world: &'a World,
        device: usize,
        needs: Option<usize>,
        /// Both sets have frozen their first device.
        met: Option<Arc<Barrier>>,
        attached: bool,
    }

    impl Pending for One<'_> {
        fn freeze(&mut self, until: Instant) -> Result<(), NotInTime> {
            if let Some(met) = self.met.take() {
                met.wait();
            }
            let mut frozen = self.world.frozen.lock().unwrap();
            frozen[self.device] += 1;
            while self.needs.is_some_and(|below| frozen[below] > 0) {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    frozen[self.device] -= 1;
                    self.world.changed.notify_all();
                    return Err(NotInTime);
                }
                frozen = self.world.changed.wait_timeout(frozen, left).unwrap().0;
            }
            Ok(())
        }

        fn attach(&mut self) {
            self.attached = true;
        }

        fn thaw(&mut self) {
            self.world.frozen.lock().unwrap()[self.device] -= 1;
            self.world.changed.notify_all();
        }
    }

    #[test]
    fn sets_that_wait_for_what_the_other_has_frozen_get_on() {
        let [p, q, r, s] = [0, 1, 2, 3];
        for _ in 0..20 {
            let world = World::default();
            // p lies on r and s on q.
            let met = Arc::new(Barrier::new(2));
            let set = |first, then, below| {
                let one = |device, needs, met| One { world: &world, device, needs, met, attached: false };
                let (mut held, mut next) =
                    (one(first, None, None), one(then, Some(below), Some(Arc::clone(&met))));
                let begun = Instant::now();
                take(&mut [&mut held, &mut next]).unwrap();
                assert!(begun.elapsed() < FREEZE_MAX, "they waited for the deadline");
                assert!(held.attached && next.attached);
            };
            std::thread::scope(|scope| {
                scope.spawn(|| set(q, p, r));
                scope.spawn(|| set(r, s, q));
            });
            assert_eq!(*world.frozen.lock().unwrap(), [0; 4]);
        }
    }

    #[test]
    fn one_that_cannot_be_frozen_is_named_and_holds_up_no_other_set() {
        let world = World::default();
        // Its writes never end.
        world.frozen.lock().unwrap()[3] = 1;
        let one = |device, needs| One { world: &world, device, needs, met: None, attached: false };
        std::thread::scope(|scope| {
            let late = scope.spawn(|| {
                let (mut a, mut b) = (one(0, None), one(1, Some(3)));
                let outcome = take(&mut [&mut a, &mut b]);
                assert!(!a.attached && !b.attached);
                outcome
            });
            let mut others = 0;
            while !late.is_finished() {
                let (mut a, mut b) = (one(2, None), one(2, None));
                take(&mut [&mut a, &mut b]).unwrap();
                others += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(others > 100, "{others}");
            assert_eq!(late.join().unwrap(), Err(Late { at: 1 }));
        });
        assert_eq!(*world.frozen.lock().unwrap(), [0, 0, 0, 1]);
    }
}
