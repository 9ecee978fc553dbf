//! Device wrapper that adds dm-snapshot's table locks to a RAM disk: one lock, as before Linux 5.2,
//! or a shared lock and two bucket locks, as since then. Only the benchmark uses these locks. The
//! locks are held around the device's own slot locks.

use std::sync::Arc;

use freestone::PAGE_BYTES;
use freestone::device::{Buffer, Completion, Device, IoBuf, Request, Result, TryResult, forward_device};
use freestone::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};

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
        match self {
            Self::One(one) => Guards::One { _one: one.lock() },
            Self::Buckets { shared, complete, pending } => {
                let page = request.offset as usize / PAGE_BYTES;
                let shared = shared.read();
                let complete = complete[page % COMPLETE_BUCKETS].lock();
                let pending = pending[page % PENDING_BUCKETS].lock();
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
    forward_device!(|locked| locked.device => geometry, extents; prefetch: none, zoned: none, changes: none);

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let _guards = self.locks.acquire(request);
        self.device.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let _guards = self.locks.acquire(&request);
        self.device.submit(request, buffer, done);
    }
}

#[cfg(test)]
mod tests {
    use freestone::device::{Blocking, Flags};
    use freestone::null::{self, Null};
    use freestone_testkit::TestDevice;

    use super::*;

    #[test]
    fn request_holds_its_locks_and_releases_them() {
        for locks in [Locks::one(), Locks::buckets()] {
            let locks = Arc::new(locks);
            let null = Null::new(null::Config::plain(1 << 20, 4096)).unwrap();
            // Record during each request whether the locks of page 1 are free.
            let was_free = Arc::new(Mutex::new(Vec::new()));
            let (probed, record) = (Arc::clone(&locks), Arc::clone(&was_free));
            let probe = TestDevice::over(Arc::new(null)).on_request(move |_| {
                record.lock().push(match &*probed {
                    Locks::One(one) => one.try_lock().is_some(),
                    Locks::Buckets { complete, pending, .. } => {
                        complete[1].try_lock().is_some() || pending[1].try_lock().is_some()
                    }
                });
            });
            let locked = LockedDevice { device: Arc::new(probe), locks };
            locked.write_at(4096, &[1; PAGE_BYTES], Flags::empty()).unwrap();
            locked.write_at(0, &[1; PAGE_BYTES], Flags::empty()).unwrap();
            // Page 0 is in other buckets than page 1, so with bucket locks page 1 stays free.
            let other = matches!(*locked.locks, Locks::Buckets { .. });
            assert_eq!(*was_free.lock(), [false, other]);
        }
    }
}
