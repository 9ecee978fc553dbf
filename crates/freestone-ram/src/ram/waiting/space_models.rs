//! loom model of [`SpaceWaiters`](super::space_waiters::SpaceWaiters): no wake-up is lost.

use loom::thread;

use super::space_waiters::SpaceWaiters;
use freestone_core::sync::{Arc, AtomicU64, Ordering};

/// Checks for space, and queues a waiter if none is found. Returns true if space was found, false
/// if the waiter is queued. `seen` is the last seen generation.
fn look(room: &AtomicU64, waiters: &SpaceWaiters<u64>, mut seen: u64) -> bool {
    loop {
        // Relaxed: the protocol must provide the ordering.
        if room.load(Ordering::Relaxed) > 0 {
            return true;
        }
        match waiters.wait(seen, |seen| seen) {
            Some(again) => seen = again,
            None => return false,
        }
    }
}

/// Runs the model with `makers` threads that free space concurrently.
fn check_waiter_is_woken(makers: usize) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let (room, waiters) = (Arc::new(AtomicU64::new(0)), Arc::new(SpaceWaiters::default()));
        let makers: Vec<_> = (0..makers)
            .map(|_| {
                let (room, waiters) = (Arc::clone(&room), Arc::clone(&waiters));
                thread::spawn(move || {
                    // Relaxed: the protocol must provide the ordering.
                    room.store(1, Ordering::Relaxed);
                    waiters.wake_all()
                })
            })
            .collect();
        let found = look(&room, &waiters, 0);
        let mut woken: Vec<u64> = makers.into_iter().flat_map(|maker| maker.join().unwrap()).collect();
        assert_eq!(woken.len(), usize::from(!found), "a waiter is woken once");
        assert!(woken.pop().is_none_or(|seen| look(&room, &waiters, seen)), "and finds it then");
        assert!(waiters.take(|_| true).is_empty());
    });
}

#[test]
fn waiter_is_woken_by_maker() {
    check_waiter_is_woken(1);
}

#[test]
fn waiter_is_woken_by_one_of_two_makers() {
    check_waiter_is_woken(2);
}
