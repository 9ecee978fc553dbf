//! loom models of how exceptions are made: every interleaving of small cases.
//!
//! Run with `cargo xtask test --only models`. The devices are mutexes: what they promise
//! is that a read which sees a write also sees what came before it.

use loom::thread;

use super::exceptions::{Exception, Exceptions};
use freestone_core::slot::Common;
use freestone_core::sync::{Arc, AtomicU32, Mutex, Ordering};

/// Content of the chunk: as it was, as the origin's writers and the snapshot's writer leave it.
const OLD: u32 = 1;
const NEW: u32 = 2;
const OWN: u32 = 3;

/// One chunk: its exception, and what the two devices hold.
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

/// Every interleaving with at most two preemptions: three would take minutes.
fn bounded(body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(body);
}

impl OneChunk {
    /// Asks for the exception, as a request does; makes it if nobody does. False: it is pending,
    /// and `heard` will say when not.
    fn ask(&self, heard: &Arc<AtomicU32>) -> bool {
        if self.exceptions.get(0).chunk().is_some() {
            return true;
        }
        let locked = self.exceptions.lock(0).unwrap();
        match locked.now() {
            Exception::At(_) | Exception::Merging(_) => return true,
            Exception::Pending => {
                locked.wait(Arc::clone(heard));
                return false;
            }
            Exception::None => locked.begin(Arc::clone(heard)),
        }
        self.copies.fetch_add(1, Ordering::SeqCst);
        let content = *self.origin.lock();
        *self.cow.lock() = content;
        for waiter in self.exceptions.land(0, Some(7)) {
            waiter.fetch_add(1, Ordering::SeqCst);
        }
        true
    }

    /// Reads the chunk of the snapshot.
    fn read(&self) -> Option<u32> {
        if self.exceptions.get(0).chunk().is_some() {
            return Some(*self.cow.lock());
        }
        let content = *self.origin.lock();
        if !self.exceptions.none_complete(0, 1) {
            return Some(*self.cow.lock());
        }
        (self.invalid.load(Ordering::SeqCst) == 0).then_some(content)
    }
}

/// Two writes that need the exception of one chunk, while the snapshot is read: it is copied once,
/// each writer hears of it, what was copied is the old content, and so is what was read.
#[test]
fn a_chunk_is_copied_once_and_frozen() {
    bounded(|| {
        let shared = one_chunk();
        let writers: Vec<_> = (0..2)
            .map(|_| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let heard = Arc::new(AtomicU32::new(0));
                    if shared.ask(&heard) {
                        *shared.origin.lock() = NEW;
                    }
                    heard
                })
            })
            .collect();
        assert_eq!(shared.read(), Some(OLD), "the snapshot changed");
        for writer in writers {
            let heard = writer.join().unwrap().load(Ordering::SeqCst);
            assert!(heard <= 1);
        }
        assert_eq!(shared.copies.load(Ordering::SeqCst), 1, "copied twice");
        assert_eq!(*shared.cow.lock(), OLD, "copied too late");
        assert_eq!(*shared.origin.lock(), NEW);
    });
}

/// Whoever waits for a pending exception hears of its end, once.
#[test]
fn nobody_waits_for_an_exception_that_is_complete() {
    loom::model(|| {
        let shared = one_chunk();
        let heard = Arc::new(AtomicU32::new(0));
        shared.exceptions.lock(0).unwrap().begin(Arc::new(AtomicU32::new(0)));
        let waiter = {
            let (shared, heard) = (Arc::clone(&shared), Arc::clone(&heard));
            thread::spawn(move || shared.ask(&heard))
        };
        for waiter in shared.exceptions.land(0, Some(7)) {
            waiter.fetch_add(1, Ordering::SeqCst);
        }
        let complete = waiter.join().unwrap();
        assert_eq!(heard.load(Ordering::SeqCst), u32::from(!complete));
        assert_eq!(shared.exceptions.get(0), Exception::At(7));
    });
}

/// The snapshot writes a whole chunk while the origin is written and the snapshot is read: what was
/// read is old or the snapshot's own, never the origin's new content, and the snapshot keeps its
/// own.
#[test]
fn a_whole_write_to_the_snapshot_meets_one_to_the_origin() {
    bounded(|| {
        let shared = one_chunk();
        let own = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let heard = Arc::new(AtomicU32::new(0));
                let locked = shared.exceptions.lock(0).unwrap();
                if locked.now() == Exception::None {
                    locked.begin(heard);
                    *shared.cow.lock() = OWN;
                    drop(shared.exceptions.land(0, Some(7)));
                    return true;
                }
                locked.now().chunk().is_some_and(|_| {
                    *shared.cow.lock() = OWN;
                    true
                })
            })
        };
        let origin = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                if shared.ask(&Arc::new(AtomicU32::new(0))) {
                    *shared.origin.lock() = NEW;
                }
            })
        };
        let read = shared.read();
        assert!(read == Some(OLD) || read == Some(OWN), "{read:?}");
        origin.join().unwrap();
        let written = own.join().unwrap();
        // A write that came to a pending exception would wait and go on later.
        assert_eq!(shared.read(), Some(if written { OWN } else { OLD }));
    });
}

/// There is no room: the snapshot is given up and the origin overwritten. Whoever read the old
/// chunk meanwhile gets it whole, or is told that the snapshot is lost; nobody gets new content.
#[test]
fn a_lost_snapshot_shows_nothing_new() {
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

/// A chunk is merged while the snapshot, which plays the origin's part, is written: the write is in
/// the origin in the end.
#[test]
fn a_write_during_a_merge_is_not_lost() {
    bounded(|| {
        let shared = one_chunk();
        shared.exceptions.load(0, 7).unwrap();
        // Writes to the COW device under way, and writes that were held.
        let tracked = Arc::new(Mutex::new((0_u32, Vec::new())));
        *shared.cow.lock() = OLD;
        let writer = {
            let (shared, tracked) = (Arc::clone(&shared), Arc::clone(&tracked));
            thread::spawn(move || {
                let locked = shared.exceptions.lock_present(0).unwrap();
                match locked.now() {
                    Exception::At(_) => {
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
        shared.exceptions.lock_present(0).unwrap().mark(true);
        while tracked.lock().0 > 0 {
            thread::yield_now();
        }
        let content = *shared.cow.lock();
        *shared.origin.lock() = content;
        shared.exceptions.lock_present(0).unwrap().forget();
        let held = std::mem::take(&mut tracked.lock().1);
        for content in held {
            *shared.origin.lock() = content;
        }
        writer.join().unwrap();
        assert_eq!(*shared.origin.lock(), OWN, "a write was lost");
        assert_eq!(shared.exceptions.get(0), Exception::None);
    });
}
