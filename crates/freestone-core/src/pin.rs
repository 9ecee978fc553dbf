//! Pins: how a request says "I am working on this table", with the cost on the side of the rare
//! change.
//!
//! A device-wide change (reset, removal, later snapshots and power cuts) swaps a pointer and then
//! waits until every request that may still use the old table is through. A request marks its own
//! thread's record with a plain store; the ordering that this lacks is supplied by the changing
//! side with `membarrier(2)`, as in user-space RCU.
//!
//! # Protocol
//! * Pin: make the own sequence odd; *light barrier*; load the pointer.
//! * Change: swap the pointer; *heavy barrier*; wait for each record that is odd to move on.
//! * Either the change sees the odd sequence and waits, or the request loads the new pointer.
//!
//! # Rule
//! A change waits for all pins of the process. So a pinned thread waits for nothing but a slot
//! lock, and calls no device: what that does, and what it waits for, is its own affair. Under a pin
//! a request takes what it needs (a count at a [gate](crate::freeze_gate), a handle), leaves, and
//! goes on unpinned. [`assert_unpinned`] stands at the entrance of devices and before what blocks,
//! and panics in debug builds. One exception: a fork reads its family's snapshots below it under
//! one pin, through their tables and not as devices; that waits for slot locks only.
//!
//! There is one set of threads that pin, the process's (a loom model's run has one of its own), and
//! nobody outside of this module has another. So every pin is one that every change waits for, and
//! the types need not say which belong together.
//!
//! Pins nest.

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

/// The set of threads that pin: there is only [`DOMAIN`].
///
/// Lock order: `records` is held for a registration and for a copy; nothing is taken under it.
struct Domain {
    records: Mutex<Vec<Arc<Record>>>,
    /// `membarrier` is not to be had: pins pay for a full fence of their own.
    fenced_pins: bool,
}

/// Odd while its thread is pinned. Written by its thread only.
type Record = CachePadded<AtomicU64>;

/// A thread's membership.
struct Participant {
    record: Arc<Record>,
    depth: Cell<u32>,
    fenced: bool,
}

/// While it lives, no table that its thread can reach is taken down.
pub struct Pin<'a> {
    participant: &'a Participant,
}

impl Domain {
    /// Without members.
    fn new() -> Self {
        Self { records: Mutex::new(Vec::new()), fenced_pins: !barrier::register() }
    }

    /// Adds the calling thread. The record is forgotten when the participant is dropped.
    fn join(&self) -> Participant {
        let record = Arc::new(CachePadded::new(AtomicU64::new(0)));
        let mut records = self.records.lock();
        records.retain(|r| Arc::strong_count(r) > 1);
        records.push(Arc::clone(&record));
        Participant { record, depth: Cell::new(0), fenced: self.fenced_pins }
    }

    /// Returns when every pin that was held at the moment of the call has been released.
    fn wait_for_pins(&self) {
        barrier::heavy(self.fenced_pins);
        // Threads that join later load pointers later: the copy need not see them.
        let records = self.records.lock().clone();
        for record in records {
            // Acquire: pairs with the Release of the unpin; what the pinned thread did is visible
            // after it.
            let seen = record.load(Ordering::Acquire);
            if seen & 1 == 0 {
                continue;
            }
            let mut tries = 0_u32;
            // Acquire: as above.
            while record.load(Ordering::Acquire) == seen {
                pause(&mut tries);
            }
        }
    }
}

/// Runs `work` with the calling thread pinned.
#[inline]
pub fn pinned<R>(work: impl FnOnce(&Pin<'_>) -> R) -> R {
    // Not `with` around all of it: the compiler would not make one function of a request then.
    let participant = THIS_THREAD.with(Rc::clone);
    let pin = participant.pin();
    work(&pin)
}

fn assert_not_pinned() {
    assert!(THIS_THREAD.with(|this| this.depth.get()) == 0, "a thread that is pinned waits for pins");
}

/// The calling thread is going to wait, or to do what may wait: in debug builds it must have
/// nothing pinned.
#[inline]
#[track_caller]
pub fn assert_unpinned() {
    #[cfg(all(debug_assertions, not(loom)))]
    {
        // A thread that is ending has nothing pinned.
        let depth = THIS_THREAD.try_with(|this| this.depth.get()).unwrap_or(0);
        assert!(depth == 0, "a pinned thread waits, or calls a device");
    }
}

/// Waits on `condvar` until notified, with nothing pinned; may wake up without reason.
pub fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    assert_unpinned();
    condvar.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits a moment for another thread, which is not waiting for this one.
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
    #[inline]
    fn pin(&self) -> Pin<'_> {
        let depth = self.depth.get();
        self.depth.set(depth + 1);
        if depth == 0 {
            // Relaxed: only this thread writes its record.
            let sequence = self.record.load(Ordering::Relaxed);
            // Release: pairs with the Acquire in wait_for_pins, which may see this pin instead of
            // the unpin before it. Ordered before the loads of tables by the light barrier, paired
            // with the heavy one.
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

/// A pointer that requests load under a pin and that a device-wide change swaps.
pub struct Swap<T> {
    pointer: AtomicPtr<T>,
}

mod swap {
    #![expect(unsafe_code)]
    // UNSAFETY: hands out references to a heap object whose life is bounded by pins, which the
    // borrow checker cannot see.

    use super::{DOMAIN, Ordering, Pin, Swap, assert_not_pinned};
    use crate::sync::AtomicPtr;

    impl<T> Swap<T> {
        /// Holds `value`.
        pub fn new(value: Box<T>) -> Self {
            // A model's threads find the domain made: that its making orders them would hide what
            // the barriers are for.
            #[cfg(loom)]
            let _ = &*DOMAIN;
            Self { pointer: AtomicPtr::new(Box::into_raw(value)) }
        }

        /// The present value, for as long as the pin is held.
        #[inline]
        pub fn load<'a>(&'a self, _pin: &'a Pin<'_>) -> &'a T {
            // Acquire: pairs with the Release half of the swap that stored the pointer.
            let pointer = self.pointer.load(Ordering::Acquire);
            // SAFETY: the pointer came from Box::into_raw; `replace` frees it only after every pin
            // that was held at its swap is gone; this one is held for 'a, and is among them, as
            // there is one domain.
            unsafe { &*pointer }
        }

        /// Puts `value` in place and returns the old one, which nobody uses any more. The calling
        /// thread is not pinned.
        ///
        /// # Panics
        /// It is: it would wait for itself.
        pub fn replace(&self, value: Box<T>) -> Box<T> {
            assert_not_pinned();
            // AcqRel: Release pairs with the Acquire in load; Acquire with the swap that stored the
            // old one.
            let old = self.pointer.swap(Box::into_raw(value), Ordering::AcqRel);
            DOMAIN.wait_for_pins();
            // SAFETY: from Box::into_raw, swapped out exactly once, and no pin that could have
            // loaded it is left.
            unsafe { Box::from_raw(old) }
        }
    }

    impl<T> Drop for Swap<T> {
        fn drop(&mut self) {
            // Relaxed: `&mut self`, nobody else is here.
            let pointer = self.pointer.load(Ordering::Relaxed);
            // SAFETY: from Box::into_raw, and `&mut self` means that no reference from `load` is
            // alive.
            drop(unsafe { Box::from_raw(pointer) });
        }
    }

    // SAFETY: Swap owns a Box<T> and gives out &T and Box<T> across threads.
    unsafe impl<T: Send + Sync> Sync for Swap<T> {}
    // SAFETY: as above.
    unsafe impl<T: Send + Sync> Send for Swap<T> {}
}

pub(crate) mod barrier {
    //! The two halves of the asymmetric barrier.
    use super::{Ordering, fence};

    #[cfg(not(loom))]
    pub fn register() -> bool {
        use rustix::thread::{MembarrierCommand, membarrier};
        membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
    }

    #[cfg(loom)]
    pub fn register() -> bool {
        // The model knows no membarrier: it checks the protocol with fences on both sides.
        false
    }

    /// Whether the light half must be a full fence.
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
                // Registered in `register`, so this cannot fail.
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
    fn a_change_waits_for_the_pin_and_only_for_it() {
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
                // Pinned again and again: later pins do not hold up a change.
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

    /// Before there was one domain a change took any, and with the wrong one freed what a pinned
    /// thread was reading.
    #[test]
    fn a_change_cannot_choose_whose_pins_it_waits_for() {
        let replace: for<'s> fn(&'s Swap<u32>, Box<u32>) -> Box<u32> = Swap::replace;
        assert_eq!(*replace(&Swap::new(Box::new(1)), Box::new(2)), 1);
    }

    #[test]
    #[should_panic(expected = "a thread that is pinned waits for pins")]
    fn a_pinned_thread_does_not_wait_for_itself() {
        let swap = Swap::new(Box::new(1));
        pinned(|_| swap.replace(Box::new(2)));
    }

    #[test]
    #[cfg(debug_assertions)]
    fn a_pinned_thread_that_waits_or_calls_a_device_is_caught() {
        use crate::device::{Request, range_end};

        fn caught(what: impl FnOnce()) -> bool {
            let what = std::panic::AssertUnwindSafe(|| pinned(|_| what()));
            std::panic::catch_unwind(what).is_err()
        }
        // What every device begins a request with, and a question for extents.
        assert!(caught(|| assert_eq!(Request::read(0, 512).check_place(1 << 20, 512), Ok(()))));
        assert!(caught(|| assert_eq!(range_end(0, 512, 1 << 20), Ok(512))));
        assert!(!caught(|| ()));
        // The pins of what panicked are gone.
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
