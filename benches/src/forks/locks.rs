//! What a RAM disk does without: one lock over the table, as dm-snapshot had it before Linux 5.2,
//! and a shared lock with two locks a bucket, as it has it since. Only the benchmark has these. They
//! are taken around the device, which has the locks of its slots in addition.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use freestone::PAGE_BYTES;
use freestone::device::{Buffer, Completion, Device, Extent, Geometry, IoBuf, Request, Result, Tried};

/// Buckets of the table of complete exceptions: as many as a COW device of 1 GiB with chunks of 4
/// KiB has in the kernel.
const COMPLETE_BUCKETS: usize = 262_144;
/// Buckets of the table of pending exceptions: an eighth, as in the kernel.
const PENDING_BUCKETS: usize = COMPLETE_BUCKETS / 8;

/// The locks of one device.
pub(super) enum Locks {
    /// Which everybody takes exclusively.
    One(Mutex<()>),
    /// Lock order: `shared`, a complete bucket, a pending bucket.
    Buckets { shared: RwLock<()>, complete: Box<[Mutex<()>]>, pending: Box<[Mutex<()>]> },
}

/// Locks that are held; dropped from the inner to the outer one.
enum Guards<'a> {
    One { _one: MutexGuard<'a, ()> },
    Buckets { _pending: MutexGuard<'a, ()>, _complete: MutexGuard<'a, ()>, _shared: RwLockReadGuard<'a, ()> },
}

impl Locks {
    /// One lock.
    pub fn one() -> Self {
        Self::One(Mutex::default())
    }

    /// Locks by bucket.
    pub fn buckets() -> Self {
        let buckets = |count: usize| (0..count).map(|_| Mutex::default()).collect();
        Self::Buckets {
            shared: RwLock::default(),
            complete: buckets(COMPLETE_BUCKETS),
            pending: buckets(PENDING_BUCKETS),
        }
    }

    fn take(&self, request: &Request) -> Guards<'_> {
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

/// A device behind the locks.
pub(super) struct Locked {
    pub device: Arc<dyn Device>,
    pub locks: Arc<Locks>,
}

impl Device for Locked {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let _held = self.locks.take(request);
        self.device.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let _held = self.locks.take(&request);
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

    /// Notes whether the lock of a request for page 1 was free while it was called.
    struct Probe {
        null: Null,
        locks: Arc<Locks>,
        seen: Mutex<Vec<bool>>,
    }

    impl Device for Probe {
        fn geometry(&self) -> Geometry {
            self.null.geometry()
        }
        fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
            let free = match &*self.locks {
                Locks::One(one) => one.try_lock().is_ok(),
                Locks::Buckets { complete, pending, .. } => {
                    complete[1].try_lock().is_ok() || pending[1].try_lock().is_ok()
                }
            };
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
    fn the_locks_are_held_by_a_request_and_let_go_after_it() {
        for locks in [Locks::one(), Locks::buckets()] {
            let locks = Arc::new(locks);
            let null = Null::new(null::Config::plain(1 << 20, 4096)).unwrap();
            let probe = Arc::new(Probe { null, locks: Arc::clone(&locks), seen: Mutex::default() });
            let locked = Locked { device: probe.clone(), locks };
            locked.write_at(4096, &[1; PAGE_BYTES], Flags::empty()).unwrap();
            locked.write_at(0, &[1; PAGE_BYTES], Flags::empty()).unwrap();
            // Another page has other buckets.
            let other = matches!(*locked.locks, Locks::Buckets { .. });
            assert_eq!(*probe.seen.lock().unwrap(), [false, other]);
        }
    }
}
