//! What the engine does without: one lock over the exception table, as dm-snapshot had it before
//! Linux 5.2, and a shared lock with two locks a bucket, as it has it since. Only the benchmark has
//! these.
//!
//! A [`Locked`] device takes the locks before it calls the device that it stands before. Where that
//! one has devices below, these are
//! [`Outside`]: the locks are let go around every access to them and taken again after it. So what the locks cover is the
//! engine's own work on the caller's thread (the look at the table, the change of it, places,
//! queues), and no copying of data.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use freestone::PAGE_BYTES;
use freestone::device::{Buffer, Completion, Device, Extent, Geometry, IoBuf, Request, Result, Tried};

/// Buckets of the table of complete exceptions: as many as a COW device of 1 GiB with chunks of 4
/// KiB has in the kernel.
const COMPLETE_BUCKETS: usize = 262_144;
/// Buckets of the table of pending exceptions: an eighth, as in the kernel.
const PENDING_BUCKETS: usize = COMPLETE_BUCKETS / 8;

/// How the table is locked.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// One lock, which everybody takes exclusively.
    One,
    /// The same; what it is held for is counted.
    Timed(&'static Profile),
    /// One lock that is shared, and under it the bucket of complete exceptions, then that of
    /// pending ones.
    Buckets,
}

/// The locks of one device. They live as long as the program: a guard lies with the thread that
/// took it.
///
/// Lock order: `one`; or `shared`, a complete bucket, a pending bucket.
pub struct Locks {
    one: Mutex<()>,
    shared: RwLock<()>,
    complete: Box<[Mutex<()>]>,
    pending: Box<[Mutex<()>]>,
}

/// How long a lock was held, and how often.
#[derive(Debug, Default)]
pub struct Profile {
    /// Nanoseconds, with one reading of the clock each time.
    held: AtomicU64,
    visits: AtomicU64,
}

impl Profile {
    /// Until now. One reading of the clock is in each visit.
    pub fn held(&self) -> (Duration, u64) {
        let nanos = self.held.load(Ordering::SeqCst);
        (Duration::from_nanos(nanos), self.visits.load(Ordering::SeqCst))
    }
}

/// Counts, when it is dropped, how long it lived.
struct Timer {
    profile: &'static Profile,
    since: Instant,
}

impl Drop for Timer {
    fn drop(&mut self) {
        let held = self.since.elapsed().as_nanos() as u64;
        self.profile.held.fetch_add(held, Ordering::SeqCst);
        self.profile.visits.fetch_add(1, Ordering::SeqCst);
    }
}

/// What a thread needs to take the same locks again.
#[derive(Clone, Copy)]
struct Place {
    locks: &'static Locks,
    kind: Kind,
    chunk: u64,
}

/// Locks that are held; dropped from the inner to the outer one.
enum Guards {
    One {
        _one: MutexGuard<'static, ()>,
    },
    Timed {
        _timer: Timer,
        _one: MutexGuard<'static, ()>,
    },
    Buckets {
        _pending: MutexGuard<'static, ()>,
        _complete: MutexGuard<'static, ()>,
        _shared: RwLockReadGuard<'static, ()>,
    },
}

thread_local! {
    /// The locks that the thread holds on its way through a [`Locked`] device.
    static HELD: RefCell<Option<(Place, Guards)>> = const { RefCell::new(None) };
}

impl Locks {
    fn new() -> &'static Self {
        let buckets = |count: usize| (0..count).map(|_| Mutex::default()).collect();
        Box::leak(Box::new(Self {
            one: Mutex::default(),
            shared: RwLock::default(),
            complete: buckets(COMPLETE_BUCKETS),
            pending: buckets(PENDING_BUCKETS),
        }))
    }
}

impl Place {
    fn lock(self) -> (Self, Guards) {
        let lock = |mutex: &'static Mutex<()>| mutex.lock().unwrap_or_else(PoisonError::into_inner);
        let guards = match self.kind {
            Kind::One => Guards::One { _one: lock(&self.locks.one) },
            Kind::Timed(profile) => {
                let one = lock(&self.locks.one);
                Guards::Timed { _timer: Timer { profile, since: Instant::now() }, _one: one }
            }
            Kind::Buckets => {
                let shared = self.locks.shared.read().unwrap_or_else(PoisonError::into_inner);
                let complete = lock(&self.locks.complete[self.chunk as usize % COMPLETE_BUCKETS]);
                let pending = lock(&self.locks.pending[self.chunk as usize % PENDING_BUCKETS]);
                Guards::Buckets { _pending: pending, _complete: complete, _shared: shared }
            }
        };
        (self, guards)
    }
}

/// A device behind the locks.
pub struct Locked {
    device: Arc<dyn Device>,
    locks: &'static Locks,
    kind: Kind,
}

impl Locked {
    /// Puts a device behind locks of its own.
    pub fn new(device: Arc<dyn Device>, kind: Kind) -> Self {
        Self { device, locks: Locks::new(), kind }
    }

    /// The table's part of a request that begins in `chunk`.
    fn locked<R>(&self, request: &Request, work: impl FnOnce() -> R) -> R {
        let place = Place { locks: self.locks, kind: self.kind, chunk: request.offset / PAGE_BYTES as u64 };
        let held = place.lock();
        HELD.set(Some(held));
        let result = work();
        HELD.set(None);
        result
    }
}

impl Device for Locked {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        self.locked(request, || self.device.try_io(request, buffer))
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.locked(&request, || self.device.submit(request, buffer, done));
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.device.extents(offset, len, row)
    }
}

/// A device below a [`Locked`] one: no lock of that is held while it works.
pub struct Outside<D>(pub D);

impl<D: Device> Outside<D> {
    fn unlocked<R>(&self, work: impl FnOnce(&D) -> R) -> R {
        let place = HELD.take().map(|(place, guards)| {
            drop(guards);
            place
        });
        let result = work(&self.0);
        if let Some(place) = place {
            let held = place.lock();
            HELD.set(Some(held));
        }
        result
    }
}

impl<D: Device> Device for Outside<D> {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        self.unlocked(|device| device.try_io(request, buffer))
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.unlocked(|device| device.submit(request, buffer, done));
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.0.extents(offset, len, row)
    }
}

#[cfg(test)]
mod tests {
    use freestone::device::{Blocking, Flags};
    use freestone::null::{self, Null};

    use super::*;

    /// Notes whether the lock was free while it was called.
    struct Probe {
        null: Null,
        locks: Mutex<Option<&'static Locks>>,
        seen: Mutex<Vec<bool>>,
    }

    impl Device for &'static Probe {
        fn geometry(&self) -> Geometry {
            self.null.geometry()
        }
        fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
            let locks = self.locks.lock().unwrap();
            let free = locks.as_ref().is_some_and(|locks| locks.one.try_lock().is_ok());
            self.seen.lock().unwrap().push(free);
            self.null.try_io(request, buffer)
        }
        fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
            self.null.submit(request, buffer, done);
        }
        fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
            self.null.extents(offset, len, row)
        }
    }

    #[test]
    fn the_lock_is_held_by_the_engine_and_not_below_it() {
        let null = Null::new(null::Config::plain(1 << 20, 4096)).unwrap();
        let probe: &'static Probe =
            Box::leak(Box::new(Probe { null, locks: Mutex::default(), seen: Mutex::default() }));
        for (below, free) in [(Arc::new(probe) as Arc<dyn Device>, false), (Arc::new(Outside(probe)), true)] {
            let locked = Locked::new(below, Kind::One);
            *probe.locks.lock().unwrap() = Some(locked.locks);
            locked.write_at(4096, &[1; PAGE_BYTES], Flags::empty()).unwrap();
            assert_eq!(probe.seen.lock().unwrap().pop(), Some(free));
            assert!(locked.locks.one.try_lock().is_ok(), "it is let go afterwards");
            assert!(HELD.with_borrow(Option::is_none));
        }
    }

    #[test]
    fn the_time_under_the_lock_is_counted_without_what_lies_below() {
        let null = Null::new(null::Config::plain(1 << 20, 4096)).unwrap();
        let profile: &'static Profile = Box::leak(Box::default());
        let locked = Locked::new(Arc::new(Outside(null)), Kind::Timed(profile));
        locked.write_at(4096, &[1; PAGE_BYTES], Flags::empty()).unwrap();
        // Before and after the access below.
        let (held, visits) = profile.held();
        assert!(visits == 2 && held > Duration::ZERO, "{visits} {held:?}");
        assert!(locked.locks.one.try_lock().is_ok());
    }

    #[test]
    fn buckets_are_taken_and_let_go() {
        let null = Null::new(null::Config::plain(1 << 20, 4096)).unwrap();
        let locked = Locked::new(Arc::new(Outside(null)), Kind::Buckets);
        locked.write_at(4096, &[1; PAGE_BYTES], Flags::empty()).unwrap();
        for mutex in [&locked.locks.complete[1], &locked.locks.pending[1]] {
            assert!(mutex.try_lock().is_ok());
        }
        assert!(locked.locks.shared.try_write().is_ok());
    }
}
