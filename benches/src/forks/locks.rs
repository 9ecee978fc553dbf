//! Device wrapper that adds dm-snapshot's table locks to a RAM disk: one lock, as before Linux 5.2,
//! or a shared lock and two bucket locks, as since then. Only the benchmark uses these locks. The
//! locks are held around the device's own slot locks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use freestone::PAGE_BYTES;
use freestone::device::{Buffer, Completion, Device, Extent, Geometry, IoBuf, Request, Result, TryResult};

/// Number of buckets of the table of complete exceptions: the kernel's number for a COW device of 1
/// GiB with chunks of 4 KiB.
const COMPLETE_BUCKETS: usize = 262_144;
/// Number of buckets of the table of pending exceptions: an eighth of those of complete exceptions,
/// as in the kernel.
const PENDING_BUCKETS: usize = COMPLETE_BUCKETS / 8;

/// Table locks of one device.
pub(super) enum Locks {
    /// A single exclusive lock.
    One(Mutex<()>),
    /// A shared lock, and a lock per bucket. Lock order: `shared`, a complete bucket, a pending
    /// bucket.
    Buckets { shared: RwLock<()>, complete: Box<[Mutex<()>]>, pending: Box<[Mutex<()>]> },
}

/// Held locks. The fields drop in declaration order, from the innermost lock to the outermost.
enum Guards<'a> {
    One { _one: MutexGuard<'a, ()> },
    Buckets { _pending: MutexGuard<'a, ()>, _complete: MutexGuard<'a, ()>, _shared: RwLockReadGuard<'a, ()> },
}

impl Locks {
    pub fn one() -> Self {
        Self::One(Mutex::default())
    }

    /// Creates a shared lock and one lock per bucket of both tables.
    pub fn buckets() -> Self {
        let buckets = |count: usize| (0..count).map(|_| Mutex::default()).collect();
        Self::Buckets {
            shared: RwLock::default(),
            complete: buckets(COMPLETE_BUCKETS),
            pending: buckets(PENDING_BUCKETS),
        }
    }

    fn acquire(&self, request: &Request) -> Guards<'_> {
        fn lock(mutex: &Mutex<()>) -> MutexGuard<'_, ()> {
            mutex.lock().unwrap_or_else(PoisonError::into_inner)
        }
        match self {
            Self::One(one) => Guards::One { _one: lock(one) },
            Self::Buckets { shared, complete, pending } => {
                let page = request.offset as usize / PAGE_BYTES;
                let shared = shared.read().unwrap_or_else(PoisonError::into_inner);
                let complete = lock(&complete[page % COMPLETE_BUCKETS]);
                let pending = lock(&pending[page % PENDING_BUCKETS]);
                Guards::Buckets { _pending: pending, _complete: complete, _shared: shared }
            }
        }
    }
}

/// A device that holds the table locks during each request.
pub(super) struct LockedDevice {
    pub device: Arc<dyn Device>,
    pub locks: Arc<Locks>,
}

impl Device for LockedDevice {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let _guards = self.locks.acquire(request);
        self.device.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let _guards = self.locks.acquire(&request);
        self.device.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.device.extents(offset, len, row)
    }
}

#[cfg(test)]
mod tests {
    use freestone::device::{Blocking, Flags};
    use freestone::null::{self, Null};

    use super::*;

    /// Device that records during each request whether the locks of page 1 are free.
    struct Probe {
        null: Null,
        locks: Arc<Locks>,
        was_free: Mutex<Vec<bool>>,
    }

    impl Device for Probe {
        fn geometry(&self) -> Geometry {
            self.null.geometry()
        }
        fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
            let free = match &*self.locks {
                Locks::One(one) => one.try_lock().is_ok(),
                Locks::Buckets { complete, pending, .. } => {
                    complete[1].try_lock().is_ok() || pending[1].try_lock().is_ok()
                }
            };
            self.was_free.lock().unwrap().push(free);
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
    fn request_holds_its_locks_and_releases_them() {
        for locks in [Locks::one(), Locks::buckets()] {
            let locks = Arc::new(locks);
            let null = Null::new(null::Config::plain(1 << 20, 4096)).unwrap();
            let probe = Arc::new(Probe { null, locks: Arc::clone(&locks), was_free: Mutex::default() });
            let locked = LockedDevice { device: probe.clone(), locks };
            locked.write_at(4096, &[1; PAGE_BYTES], Flags::empty()).unwrap();
            locked.write_at(0, &[1; PAGE_BYTES], Flags::empty()).unwrap();
            // Page 0 is in other buckets than page 1, so with bucket locks page 1 stays free.
            let other = matches!(*locked.locks, Locks::Buckets { .. });
            assert_eq!(*probe.was_free.lock().unwrap(), [false, other]);
        }
    }
}
