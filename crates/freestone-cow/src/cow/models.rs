//! loom models of exceptions, which check every interleaving of small cases.
//!
//! Run with `cargo xtask test --only models`. The devices are modelled as mutexes: a read that sees
//! a write also sees everything before the write.

use loom::thread;

use super::exceptions::{Exception, Exceptions};
use freestone_core::slot::Common;
use freestone_core::sync::{Arc, AtomicU32, Mutex, Ordering};

/// Contents of the chunk: the original one (`OLD`), written to the origin (`NEW`), and written to
/// the snapshot (`OWN`).
const OLD: u32 = 1;
const NEW: u32 = 2;
const OWN: u32 = 3;

/// A snapshot of a single chunk: its exception, and its content on both devices.
struct OneChunk {
    exceptions: Exceptions<Arc<AtomicU32>>,
    origin: Mutex<u32>,
    cow: Mutex<u32>,
    copies: AtomicU32,
    invalid: AtomicU32,
}

fn one_chunk() -> Arc<OneChunk> {
    let common = Arc::new(Common::new().unwrap());
    Arc::new(OneChunk {
        exceptions: Exceptions::new(common, 1).unwrap(),
        origin: Mutex::new(OLD),
        cow: Mutex::new(0),
        copies: AtomicU32::new(0),
        invalid: AtomicU32::new(0),
    })
}

/// Checks every interleaving with at most two preemptions. A bound of three would take minutes.
fn bounded(body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(body);
}

impl OneChunk {
    /// Requests the exception as a write does, and makes it if it does not exist. Returns false if
    /// the exception is pending; `notified` then counts the notification at its end.
    fn request_exception(&self, notified: &Arc<AtomicU32>) -> bool {
        if self.exceptions.get(0).chunk().is_some() {
            return true;
        }
        let locked = self.exceptions.lock(0).unwrap();
        match locked.state() {
            Exception::Complete(_) | Exception::Merging(_) => return true,
            Exception::Pending => {
                locked.add_waiter(Arc::clone(notified));
                return false;
            }
            Exception::None => locked.set_pending(Arc::clone(notified)),
        }
        self.copies.fetch_add(1, Ordering::SeqCst);
        let content = *self.origin.lock();
        *self.cow.lock() = content;
        for waiter in self.exceptions.end_pending(0, Some(7)) {
            waiter.fetch_add(1, Ordering::SeqCst);
        }
        true
    }

    /// Reads the chunk from the snapshot. Returns `None` if the snapshot is lost.
    fn read(&self) -> Option<u32> {
        if self.exceptions.get(0).chunk().is_some() {
            return Some(*self.cow.lock());
        }
        let content = *self.origin.lock();
        if !self.exceptions.has_none_complete(0, 1) {
            return Some(*self.cow.lock());
        }
        (self.invalid.load(Ordering::SeqCst) == 0).then_some(content)
    }
}

/// Two writes need the exception of one chunk during a read of the snapshot. The chunk is copied
/// once, each waiting writer is notified, and the copy and the read return the old content.
#[test]
fn chunk_is_copied_once_with_old_content() {
    bounded(|| {
        let shared = one_chunk();
        let writers: Vec<_> = (0..2)
            .map(|_| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let notified = Arc::new(AtomicU32::new(0));
                    if shared.request_exception(&notified) {
                        *shared.origin.lock() = NEW;
                    }
                    notified
                })
            })
            .collect();
        assert_eq!(shared.read(), Some(OLD), "the snapshot changed");
        for writer in writers {
            let notified = writer.join().unwrap().load(Ordering::SeqCst);
            assert!(notified <= 1);
        }
        assert_eq!(shared.copies.load(Ordering::SeqCst), 1, "copied twice");
        assert_eq!(*shared.cow.lock(), OLD, "copied too late");
        assert_eq!(*shared.origin.lock(), NEW);
    });
}

/// A request that finds a pending exception is notified once.
#[test]
fn waiter_for_pending_exception_is_notified() {
    loom::model(|| {
        let shared = one_chunk();
        let notified = Arc::new(AtomicU32::new(0));
        shared.exceptions.lock(0).unwrap().set_pending(Arc::new(AtomicU32::new(0)));
        let waiter = {
            let (shared, notified) = (Arc::clone(&shared), Arc::clone(&notified));
            thread::spawn(move || shared.request_exception(&notified))
        };
        for waiter in shared.exceptions.end_pending(0, Some(7)) {
            waiter.fetch_add(1, Ordering::SeqCst);
        }
        let complete = waiter.join().unwrap();
        assert_eq!(notified.load(Ordering::SeqCst), u32::from(!complete));
        assert_eq!(shared.exceptions.get(0), Exception::Complete(7));
    });
}

/// The snapshot writes a whole chunk during a write to the origin and a read of the snapshot. The
/// read returns the original or the snapshot's data, never the origin's new data. The snapshot
/// keeps its own data.
#[test]
fn whole_chunk_write_races_origin_write() {
    bounded(|| {
        let shared = one_chunk();
        let own = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let notified = Arc::new(AtomicU32::new(0));
                let locked = shared.exceptions.lock(0).unwrap();
                if locked.state() == Exception::None {
                    locked.set_pending(notified);
                    *shared.cow.lock() = OWN;
                    drop(shared.exceptions.end_pending(0, Some(7)));
                    return true;
                }
                locked.state().chunk().is_some_and(|_| {
                    *shared.cow.lock() = OWN;
                    true
                })
            })
        };
        let origin = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                if shared.request_exception(&Arc::new(AtomicU32::new(0))) {
                    *shared.origin.lock() = NEW;
                }
            })
        };
        let read = shared.read();
        assert!(read == Some(OLD) || read == Some(OWN), "{read:?}");
        origin.join().unwrap();
        let written = own.join().unwrap();
        // In the real code a write that finds a pending exception waits and runs later.
        assert_eq!(shared.read(), Some(if written { OWN } else { OLD }));
    });
}

/// The COW device is full: the snapshot is invalidated and the origin overwritten. A concurrent
/// read of the snapshot returns the old data or fails.
#[test]
fn lost_snapshot_never_returns_new_data() {
    loom::model(|| {
        let shared = one_chunk();
        let origin = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.invalid.store(1, Ordering::SeqCst);
                *shared.origin.lock() = NEW;
            })
        };
        let read = shared.read();
        assert!(read.is_none() || read == Some(OLD), "{read:?}");
        origin.join().unwrap();
        assert_eq!(shared.read(), None);
    });
}

/// A chunk is merged during a write to the snapshot, which serves the origin. The origin contains
/// the data of the write in the end.
#[test]
fn write_during_merge_reaches_origin() {
    bounded(|| {
        let shared = one_chunk();
        shared.exceptions.load(0, 7).unwrap();
        // The number of writes in flight to the COW device, and the data of the held writes.
        let tracked = Arc::new(Mutex::new((0_u32, Vec::new())));
        *shared.cow.lock() = OLD;
        let writer = {
            let (shared, tracked) = (Arc::clone(&shared), Arc::clone(&tracked));
            thread::spawn(move || {
                let locked = shared.exceptions.lock_present(0).unwrap();
                match locked.state() {
                    Exception::Complete(_) => {
                        tracked.lock().0 += 1;
                        drop(locked);
                        *shared.cow.lock() = OWN;
                        tracked.lock().0 -= 1;
                    }
                    Exception::Merging(_) => tracked.lock().1.push(OWN),
                    Exception::None => *shared.origin.lock() = OWN,
                    Exception::Pending => unreachable!("nothing is pending"),
                }
            })
        };
        shared.exceptions.lock_present(0).unwrap().set_merging(true);
        while tracked.lock().0 > 0 {
            thread::yield_now();
        }
        let content = *shared.cow.lock();
        *shared.origin.lock() = content;
        shared.exceptions.lock_present(0).unwrap().remove();
        let held = std::mem::take(&mut tracked.lock().1);
        for content in held {
            *shared.origin.lock() = content;
        }
        writer.join().unwrap();
        assert_eq!(*shared.origin.lock(), OWN, "a write was lost");
        assert_eq!(shared.exceptions.get(0), Exception::None);
    });
}
