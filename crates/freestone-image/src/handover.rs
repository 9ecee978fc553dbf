//! Submission of queued entries to the kernel, by any thread.
//!
//! Submitters queue entries under a lock. A thread claims the hand-over (the right to submit, which
//! one thread at a time has) and calls the kernel without the lock. The claimant also submits
//! entries that are queued meanwhile. A submitter whose call fails leaves the entries in the queue
//! and wakes the reaper (the thread that reaps completions), which retries.
//!
//! Invariants: the wake-up does not pass through the queue, and the reaper sleeps only while the
//! queue is empty or another thread has the claim. Every entry therefore has a thread that will
//! submit it.

use std::io;

use freestone_core::sync::MutexGuard;

/// Maximum number of submission calls that a submitter makes at once, so that it does not submit
/// entries of other threads for long.
const SUBMITTER_CALLS: usize = 4;

/// A queue of entries to be submitted to the kernel.
pub trait Submission {
    /// The state that the lock of the queue protects.
    type State;

    /// Locks the queue and returns its state.
    fn lock(&self) -> MutexGuard<'_, Self::State>;

    /// Returns the flag that is true while a thread claims the hand-over.
    fn claimed(state: &mut Self::State) -> &mut bool;

    /// Returns true if no entry is queued for submission.
    fn is_empty(&self, state: &mut Self::State) -> bool;

    /// Submits queued entries to the kernel. Called without the lock, by the thread that has the
    /// claim.
    fn enter(&self) -> io::Result<()>;

    /// Wakes the reaper, or makes the next wait of the reaper return at once.
    fn wake_reaper(&self);

    /// Claims the hand-over and returns true. Returns false if the queue is empty or another thread
    /// has the claim.
    fn claim(&self, state: &mut Self::State) -> bool {
        let is_mine = !*Self::claimed(state) && !self.is_empty(state);
        *Self::claimed(state) |= is_mine;
        is_mine
    }

    /// Submits queued entries with at most `calls` system calls, and gives up the claim. Returns an
    /// error if entries are left in the queue.
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

    /// Submits queued entries, or leaves them to the reaper if a call fails.
    fn submit_queued(&self) {
        let is_mine = self.claim(&mut self.lock());
        if is_mine && self.hand_over(SUBMITTER_CALLS).is_err() {
            self.wake_reaper();
        }
    }
}

#[cfg(all(loom, test))]
mod models {
    //! loom models: each entry reaches the kernel, whichever submission calls fail.

    use std::io;

    use freestone_core::sync::{Arc, AtomicU32, Condvar, Mutex, MutexGuard, Ordering::SeqCst};
    use loom::thread;

    use super::Submission;

    /// Model of a ring, which counts entries instead of storing them.
    struct Ring {
        claimed: Mutex<bool>,
        queued: AtomicU32,
        taken: AtomicU32,
        /// Number of following submission calls that fail.
        refusals: AtomicU32,
        /// True after a completion or a wake-up that the reaper has not noticed yet.
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
            // The kernel completes the entries, which wakes the reaper.
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

        /// Runs the reaper until `count` entries have completed.
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
                    event = self.changed.wait(event);
                }
                *event = false;
            }
        }
    }

    /// Checks that all entries complete. After a lost wake-up the model deadlocks, which loom
    /// reports.
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
