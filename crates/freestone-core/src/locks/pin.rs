//! Pins: read-side critical sections of requests, as in user-space RCU. Requests pay almost nothing; the rare
//! change of a whole device pays for the ordering.
//!
//! A device-wide change (reset, removal, snapshot) swaps a pointer and then waits for every request that may
//! still use the old table. A request marks its thread's record with a plain store; the change orders these
//! stores with `membarrier(2)`.
//!
//! # Protocol
//! * Pin: make the thread's sequence odd; *light barrier*; load the pointer.
//! * Change: swap the pointer; *heavy barrier*; wait until each odd record has changed.
//! * Either the change sees the odd sequence and waits, or the request loads the new pointer.
//!
//! # Rule
//! A change waits for all pins of the process. So a pinned thread may wait only for slot locks, and must not
//! call a device, which could wait for anything. Under a pin a request acquires what it needs (a count at a
//! [gate](crate::freeze_gate), a handle), unpins, and continues. Devices call [`assert_unpinned`] on entry
//! and before they block; it panics in debug builds. The only exception: a fork reads the snapshots of its
//! family (a base and its forks, which share memory) under one pin. The fork reads the page tables of these
//! snapshots and does not call them as devices, so it waits for slot locks only.
//! `crates/freestone/tests/library/pinned.rs` checks the rule with lower devices that wait for such a change
//! at every call.
//!
//! The process has a single, private set of pinning threads (a loom model has one for each run). So every
//! change waits for every pin, and the types need not connect a pin to a pointer.
//!
//! Pins nest: a pinned thread can pin again.

use crate::sync::{
    Arc, AtomicPtr, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, fence, thread_local, yield_now,
};
#[cfg(not(loom))]
use crate::sync::{LazyLock, compiler_fence};
use crossbeam_utils::CachePadded;
use std::cell::Cell;
use std::rc::Rc;

#[cfg(not(loom))]
static DOMAIN: LazyLock<Domain> = LazyLock::new(Domain::new);
#[cfg(loom)]
loom::lazy_static! {
    static ref DOMAIN: Domain = Domain::new();
}

thread_local! {
    static THIS_THREAD: Rc<Participant> = Rc::new(DOMAIN.join());
}

/// The set of threads that pin; [`DOMAIN`] is the only one.
///
/// Lock order: `records` is innermost, held for a registration or a copy.
struct Domain {
    records: Mutex<Vec<Arc<Record>>>,
    /// True if `membarrier` is unavailable; each pin then executes a full fence.
    fenced_pins: bool,
}

/// A thread's sequence number, odd while pinned. Written by that thread only.
type Record = CachePadded<AtomicU64>;

/// A thread that pins.
pub struct Participant {
    record: Arc<Record>,
    depth: Cell<u32>,
    fenced: bool,
}

/// Proof that the thread is pinned. No table that the thread loads is freed before the drop.
pub struct Pin<'a> {
    participant: &'a Participant,
}

impl Domain {
    fn new() -> Self {
        Self { records: Mutex::new(Vec::new()), fenced_pins: !barrier::register() }
    }

    /// Registers the calling thread, and removes the records of threads that have ended.
    fn join(&self) -> Participant {
        let record = Arc::new(CachePadded::new(AtomicU64::new(0)));
        let mut records = self.records.lock();
        records.retain(|r| Arc::strong_count(r) > 1);
        records.push(Arc::clone(&record));
        Participant { record, depth: Cell::new(0), fenced: self.fenced_pins }
    }

    /// Waits until every pin held at the call has been released.
    fn wait_for_pins(&self) {
        barrier::heavy(self.fenced_pins);
        // Threads that register later load pointers later, so they may be missing in the copied list.
        let records = self.records.lock().clone();
        for record in records {
            // Acquire: pairs with the Release of the unpin, so that the accesses of the pinned thread happen
            // before the change continues.
            let sequence = record.load(Ordering::Acquire);
            if sequence & 1 == 0 {
                continue;
            }
            let mut tries = 0_u32;
            // Acquire: pairs with the Release of the unpin.
            while record.load(Ordering::Acquire) == sequence {
                pause(&mut tries);
            }
        }
    }
}

/// Runs `work` with the calling thread pinned.
#[inline]
pub fn pinned<R>(work: impl FnOnce(&Pin<'_>) -> R) -> R {
    let participant = participant();
    let pin = participant.pin();
    work(&pin)
}

/// Returns the calling thread's participant, for a hot path whose closure the compiler would not inline into
/// [`pinned`].
#[inline]
pub fn participant() -> Rc<Participant> {
    // Clones the `Rc`: running the request inside `with` would keep the compiler from inlining it.
    THIS_THREAD.with(Rc::clone)
}

fn assert_not_pinned() {
    assert!(THIS_THREAD.with(|this| this.depth.get()) == 0, "a pinned thread waits for pins");
}

/// Panics in debug builds if the calling thread is pinned. Called before anything that may wait.
#[inline]
#[track_caller]
pub fn assert_unpinned() {
    #[cfg(all(debug_assertions, not(loom)))]
    {
        // A thread that is exiting has no pins.
        let depth = THIS_THREAD.try_with(|this| this.depth.get()).unwrap_or(0);
        assert!(depth == 0, "a pinned thread waits, or calls a device");
    }
}

/// Waits on `condvar` until notified, unpinned. Spurious wake-ups are possible.
pub fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    assert_unpinned();
    condvar.wait(guard)
}

/// Backs off while another thread makes progress, which must not depend on the calling thread.
pub(crate) fn pause(tries: &mut u32) {
    *tries += 1;
    #[cfg(not(loom))]
    if *tries > 100 {
        crate::sync::thread::sleep(std::time::Duration::from_micros(50));
        return;
    }
    yield_now();
}

impl Participant {
    /// Pins the thread until the returned proof is dropped.
    #[inline]
    pub fn pin(&self) -> Pin<'_> {
        let depth = self.depth.get();
        self.depth.set(depth + 1);
        if depth == 0 {
            // Relaxed: only this thread writes its record.
            let sequence = self.record.load(Ordering::Relaxed);
            // Release: pairs with the Acquire in wait_for_pins, which may see this pin instead of the unpin
            // before. The light barrier, paired with the heavy one, orders the store before loads of tables.
            self.record.store(sequence + 1, Ordering::Release);
            barrier::light(self.fenced);
        }
        Pin { participant: self }
    }
}

impl Drop for Pin<'_> {
    #[inline]
    fn drop(&mut self) {
        let depth = self.participant.depth.get() - 1;
        self.participant.depth.set(depth);
        if depth == 0 {
            let record = &self.participant.record;
            // Relaxed: only this thread writes its record.
            let sequence = record.load(Ordering::Relaxed);
            // Release: pairs with the Acquire in wait_for_pins.
            record.store(sequence + 1, Ordering::Release);
        }
    }
}

/// A pointer that requests load under a pin, and that device-wide changes replace.
pub struct Swap<T> {
    pointer: AtomicPtr<T>,
}

mod swap {
    #![expect(unsafe_code)]
    // UNSAFETY: returns references to a heap object that lives as long as pins require, which the borrow
    // checker cannot express.

    use super::{DOMAIN, Ordering, Pin, Swap, assert_not_pinned};
    use crate::sync::AtomicPtr;

    impl<T> Swap<T> {
        /// Creates a pointer to `value`.
        pub fn new(value: Box<T>) -> Self {
            // Loom models create the domain here. Creating it later would order the model's threads and hide
            // missing barriers.
            #[cfg(loom)]
            let _ = &*DOMAIN;
            Self { pointer: AtomicPtr::new(Box::into_raw(value)) }
        }

        /// Returns the present value, valid while the pin is held.
        #[inline]
        pub fn load<'a>(&'a self, _pin: &'a Pin<'_>) -> &'a T {
            // Acquire: pairs with the Release half of the swap that stored the pointer.
            let pointer = self.pointer.load(Ordering::Acquire);
            // SAFETY: the pointer came from Box::into_raw. `replace` frees it only after all pins held at its
            // swap are released; this pin, held for 'a, is one of them, as there is one domain.
            unsafe { &*pointer }
        }

        /// Replaces the value and returns the old one, which no thread uses any more. Waits for all pins.
        ///
        /// # Panics
        /// If the calling thread is pinned, because it would wait for itself.
        pub fn replace(&self, value: Box<T>) -> Box<T> {
            assert_not_pinned();
            // AcqRel: Release pairs with the Acquire in load, Acquire with the swap that stored the old
            // pointer.
            let old = self.pointer.swap(Box::into_raw(value), Ordering::AcqRel);
            DOMAIN.wait_for_pins();
            // SAFETY: from Box::into_raw, swapped out exactly once, and every pin that could have loaded it
            // is released.
            unsafe { Box::from_raw(old) }
        }
    }

    impl<T> Drop for Swap<T> {
        fn drop(&mut self) {
            // Relaxed: `&mut self` excludes other threads.
            let pointer = self.pointer.load(Ordering::Relaxed);
            // SAFETY: from Box::into_raw, and `&mut self` excludes references from `load`.
            drop(unsafe { Box::from_raw(pointer) });
        }
    }

    // SAFETY: Swap owns a Box<T> and hands out &T and Box<T> across threads.
    unsafe impl<T: Send + Sync> Sync for Swap<T> {}
    // SAFETY: Swap owns a Box<T> and hands out &T and Box<T> across threads.
    unsafe impl<T: Send + Sync> Send for Swap<T> {}
}

pub(crate) mod barrier {
    //! The light and the heavy half of the asymmetric barrier.
    use super::{Ordering, fence};

    #[cfg(not(loom))]
    pub fn register() -> bool {
        use rustix::thread::{MembarrierCommand, membarrier};
        membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
    }

    #[cfg(loom)]
    pub fn register() -> bool {
        // loom has no membarrier, so models check the protocol with fences on both sides.
        false
    }

    /// Returns true if the light barrier must be a full fence.
    pub fn fenced() -> bool {
        #[cfg(loom)]
        return true;
        #[cfg(not(loom))]
        super::DOMAIN.fenced_pins
    }

    #[inline]
    pub fn light(fenced: bool) {
        if fenced {
            fence(Ordering::SeqCst);
        } else {
            #[cfg(not(loom))]
            super::compiler_fence(Ordering::SeqCst);
        }
    }

    pub fn heavy(fenced: bool) {
        fence(Ordering::SeqCst);
        if !fenced {
            #[cfg(not(loom))]
            {
                use rustix::thread::{MembarrierCommand, membarrier};
                // The process was registered in `register`, so this call cannot fail.
                let done = membarrier(MembarrierCommand::PrivateExpedited);
                assert!(done.is_ok(), "membarrier failed after it was registered: {done:?}");
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn replace_waits_only_for_present_pins() {
        let swap = Swap::new(Box::new(1));
        let entered = AtomicBool::new(false);
        let left = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pinned(|pin| {
                    assert_eq!(*swap.load(pin), 1);
                    entered.store(true, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(50));
                    left.store(true, Ordering::SeqCst);
                });
                // Later pins do not delay the change.
                for _ in 0..1000 {
                    pinned(|pin| assert!(*swap.load(pin) <= 2));
                }
            });
            while !entered.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            let old = swap.replace(Box::new(2));
            assert!(left.load(Ordering::SeqCst), "the change did not wait for the pin");
            assert_eq!(*old, 1);
        });
        pinned(|pin| assert_eq!(*swap.load(pin), 2));
    }

    /// Regression test: `replace` once had a domain parameter, and with the wrong domain freed a value that a
    /// pinned thread was reading.
    #[test]
    fn replace_takes_no_domain() {
        let replace: for<'s> fn(&'s Swap<u32>, Box<u32>) -> Box<u32> = Swap::replace;
        assert_eq!(*replace(&Swap::new(Box::new(1)), Box::new(2)), 1);
    }

    #[test]
    #[should_panic(expected = "a pinned thread waits for pins")]
    fn replace_by_pinned_thread_panics() {
        let swap = Swap::new(Box::new(1));
        pinned(|_| swap.replace(Box::new(2)));
    }

    #[test]
    #[cfg(debug_assertions)]
    fn device_call_by_pinned_thread_panics() {
        use crate::device::{Request, range_end};

        fn panics_pinned(work: impl FnOnce()) -> bool {
            let work = std::panic::AssertUnwindSafe(|| pinned(|_| work()));
            std::panic::catch_unwind(work).is_err()
        }
        // Devices check every request and every extent query with these functions.
        assert!(panics_pinned(|| assert_eq!(Request::read(0, 512).check_range(1 << 20, 512), Ok(()))));
        assert!(panics_pinned(|| assert_eq!(range_end(0, 512, 1 << 20), Ok(512))));
        assert!(!panics_pinned(|| ()));
        // The pins of the panicked calls are released.
        assert_unpinned();
    }

    #[test]
    fn pins_nest() {
        let swap = Swap::new(Box::new(7));
        pinned(|outer| {
            pinned(|inner| assert_eq!(*swap.load(inner), 7));
            assert_eq!(*swap.load(outer), 7);
        });
    }
}
