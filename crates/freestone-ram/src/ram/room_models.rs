//! loom model of requests that wait for room: none waits for what has come already.

use loom::thread;

use super::room_waiters::RoomWaiters;
use freestone_core::sync::{Arc, AtomicU64, Ordering};

/// Looks for room, and waits for it. True: it was found.
fn look(room: &AtomicU64, waiters: &RoomWaiters<u64>, mut seen: u64) -> bool {
    loop {
        // Relaxed: that it is seen is what the protocol owes.
        if room.load(Ordering::Relaxed) > 0 {
            return true;
        }
        match waiters.wait(seen, |seen| seen) {
            Some(again) => seen = again,
            None => return false,
        }
    }
}

/// `makers` make room, one after the other has made his or at the same time.
fn whoever_waits_is_told(makers: usize) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let (room, waiters) = (Arc::new(AtomicU64::new(0)), Arc::new(RoomWaiters::default()));
        let makers: Vec<_> = (0..makers)
            .map(|_| {
                let (room, waiters) = (Arc::clone(&room), Arc::clone(&waiters));
                thread::spawn(move || {
                    // Relaxed: as above.
                    room.store(1, Ordering::Relaxed);
                    waiters.room_came()
                })
            })
            .collect();
        let found = look(&room, &waiters, 0);
        let mut told: Vec<u64> = makers.into_iter().flat_map(|maker| maker.join().unwrap()).collect();
        assert_eq!(told.len(), usize::from(!found), "who waits is told once");
        assert!(told.pop().is_none_or(|seen| look(&room, &waiters, seen)), "and finds it then");
        assert!(waiters.take(|_| true).is_empty());
    });
}

#[test]
fn whoever_waits_is_told_by_one() {
    whoever_waits_is_told(1);
}

#[test]
fn whoever_waits_is_told_by_one_of_two() {
    whoever_waits_is_told(2);
}
