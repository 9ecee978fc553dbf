//! The hand-over of queued entries to the kernel, by any thread.
//!
//! Submitters queue entries under a lock. One thread at a time claims the hand-over and calls the
//! kernel without the lock; entries that are queued meanwhile are handed over by the claimant. A
//! submitter whose call fails leaves its entries and wakes the reaper, which tries again.
//!
//! Invariants: the wake-up does not pass through the queue, and the reaper waits only while nothing
//! is queued or another thread has the claim. So each entry has a thread that will hand it over.

use std::io;

use freestone_core::sync::MutexGuard;

/// Calls of the kernel by one submitter: other submitters may queue entries meanwhile.
const SUBMITTER_CALLS: usize = 4;

/// A queue of entries for the kernel.
pub trait Submission {
    /// The state that the queue's lock protects.
    type State;

    /// Locks the queue.
    fn lock(&self) -> MutexGuard<'_, Self::State>;

    /// Returns the flag that a thread has claimed the hand-over.
    fn claimed(state: &mut Self::State) -> &mut bool;

    /// Returns true if no entry is queued.
    fn is_empty(&self, state: &mut Self::State) -> bool;

    /// Hands entries to the kernel. Called without the lock, by the claimant alone.
    fn enter(&self) -> io::Result<()>;

    /// Ends the wait of the reaper, at once or as soon as it begins.
    fn wake_reaper(&self);

    /// Claims the hand-over. False: nothing is queued, or another thread has the claim.
    fn claim(&self, state: &mut Self::State) -> bool {
        let is_mine = !*Self::claimed(state) && !self.is_empty(state);
        *Self::claimed(state) |= is_mine;
        is_mine
    }

    /// Hands over what is queued and gives up the claim. After an error entries are left.
    fn hand_over(&self, calls: usize) -> io::Result<()> {
        for left in (0..calls).rev() {
            let entered = self.enter();
            let mut state = self.lock();
            let is_empty = self.is_empty(&mut state);
            if is_empty || entered.is_err() || left == 0 {
                *Self::claimed(&mut state) = false;
                let rest = entered.and_then(|()| Err(io::ErrorKind::WouldBlock.into()));
                return if is_empty { Ok(()) } else { rest };
            }
        }
        Ok(())
    }

    /// Hands over what submitters have queued, or leaves it to the reaper.
    fn submit_queued(&self) {
        let is_mine = self.claim(&mut self.lock());
        if is_mine && self.hand_over(SUBMITTER_CALLS).is_err() {
            self.wake_reaper();
        }
    }
}

#[cfg(all(loom, test))]
mod models {
    //! loom models: each entry reaches the kernel, whichever calls of the kernel fail.

    use std::io;

    use freestone_core::sync::{Arc, AtomicU32, Condvar, Mutex, MutexGuard, Ordering::SeqCst};
    use loom::thread;

    use super::Submission;

    /// A ring: counts of entries in the place of entries.
    struct Ring {
        claimed: Mutex<bool>,
        queued: AtomicU32,
        taken: AtomicU32,
        /// Calls that fail before one succeeds.
        refusals: AtomicU32,
        /// An answer or a wake-up for the reaper.
        event: Mutex<bool>,
        changed: Condvar,
    }

    impl Submission for Ring {
        type State = bool;

        fn lock(&self) -> MutexGuard<'_, bool> {
            self.claimed.lock()
        }

        fn claimed(state: &mut bool) -> &mut bool {
            state
        }

        fn is_empty(&self, _state: &mut bool) -> bool {
            self.queued.load(SeqCst) == 0
        }

        fn enter(&self) -> io::Result<()> {
            if self.refusals.load(SeqCst) > 0 {
                self.refusals.fetch_sub(1, SeqCst);
                return Err(io::ErrorKind::WouldBlock.into());
            }
            self.taken.fetch_add(self.queued.swap(0, SeqCst), SeqCst);
            // The kernel answers.
            self.wake_reaper();
            Ok(())
        }

        fn wake_reaper(&self) {
            *self.event.lock() = true;
            self.changed.notify_one();
        }
    }

    impl Ring {
        fn submit(&self) {
            let state = self.lock();
            self.queued.fetch_add(1, SeqCst);
            drop(state);
            self.submit_queued();
        }

        /// The reaper's loop, until `count` entries are answered.
        fn reap(&self, count: u32) {
            loop {
                let is_mine = self.claim(&mut self.lock());
                if is_mine && self.hand_over(2).is_err() {
                    thread::yield_now();
                    continue;
                }
                if self.taken.load(SeqCst) == count {
                    return;
                }
                let mut event = self.event.lock();
                while !*event {
                    event = self.changed.wait(event).unwrap();
                }
                *event = false;
            }
        }
    }

    /// A reaper that sleeps for ever is a deadlock, which loom reports.
    fn entries_arrive(submitters: u32, refusals: u32) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let ring = Arc::new(Ring {
                claimed: Mutex::new(false),
                queued: AtomicU32::new(0),
                taken: AtomicU32::new(0),
                refusals: AtomicU32::new(refusals),
                event: Mutex::new(false),
                changed: Condvar::new(),
            });
            let threads: Vec<_> = (0..submitters)
                .map(|_| {
                    let ring = Arc::clone(&ring);
                    thread::spawn(move || ring.submit())
                })
                .collect();
            ring.reap(submitters);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }

    #[test]
    fn entry_arrives_after_two_failed_calls() {
        entries_arrive(1, 2);
    }

    #[test]
    fn entries_of_two_submitters_arrive_after_failures() {
        entries_arrive(2, 2);
    }

    #[test]
    fn entries_of_two_submitters_arrive_together() {
        entries_arrive(2, 0);
    }
}
