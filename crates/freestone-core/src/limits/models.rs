//! loom models: requests wait while limits are set and removed.

use std::time::Duration;

use loom::sync::Mutex as LoomMutex;
use loom::thread;

use super::paced_queue::{Cost, Entered, Next, Pace, PacedQueue, Waits};
use crate::sync::{Arc, AtomicU32};

/// A pace with a fixed number of operations left.
struct FixedPace(u64);

impl Pace for FixedPace {
    fn pay(&mut self, owed: &mut Cost) -> Result<(), Duration> {
        if self.0 == 0 {
            return Err(Duration::ZERO);
        }
        self.0 -= 1;
        owed.operations = 0;
        Ok(())
    }
}

/// Records its number, with true if it continued and false if it was rejected.
struct TestRequest(u32, Arc<LoomMutex<Vec<(u32, bool)>>>);

impl Waits for TestRequest {
    fn waits(&mut self) {}
    fn go(self) {
        self.1.lock().unwrap().push((self.0, true));
    }
    fn gone(self) {
        self.1.lock().unwrap().push((self.0, false));
    }
}

type Log = Arc<LoomMutex<Vec<(u32, bool)>>>;
type Shared = Arc<PacedQueue<TestRequest, FixedPace>>;

fn queue(operations: u64) -> (Shared, Log) {
    let queue = PacedQueue::new(Arc::new(AtomicU32::new(0)));
    queue.set(|_| Some(FixedPace(operations)));
    (Arc::new(queue), Arc::new(LoomMutex::new(Vec::new())))
}

fn enter(queue: &Shared, number: u32, log: &Log) {
    match queue.enter(TestRequest(number, Arc::clone(log)), Cost { operations: 1, bytes: 0 }) {
        Entered::Admitted(request) => request.go(),
        Entered::Rejected(request) => request.gone(),
        Entered::First(_) | Entered::Queued => {}
    }
}

/// Dispatches until nothing is left for now, as the timer and the thread do.
fn dispatch_all(queue: &Shared) {
    while queue.dispatch(1) == Next::More {}
}

#[test]
fn caller_order_is_kept_while_limit_is_removed() {
    loom::model(|| {
        let (queue, log) = queue(0);
        enter(&queue, 1, &log);
        let others = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || {
                queue.set(|_| None);
                dispatch_all(&queue);
            })
        };
        enter(&queue, 2, &log);
        enter(&queue, 3, &log);
        others.join().unwrap();
        // A thread that found the other one dispatching left the requests to that one.
        assert_eq!(*log.lock().unwrap(), [(1, true), (2, true), (3, true)]);
        assert!(!queue.is_on());
    });
}

#[test]
fn concurrent_dispatches_lose_no_request() {
    loom::model(|| {
        let (queue, log) = queue(0);
        enter(&queue, 1, &log);
        enter(&queue, 2, &log);
        let other = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || {
                queue.set(|_| Some(FixedPace(1)));
                dispatch_all(&queue);
            })
        };
        queue.set(|_| Some(FixedPace(2)));
        dispatch_all(&queue);
        other.join().unwrap();
        let log = log.lock().unwrap().clone();
        // With the later rates one or two requests have continued, and no affordable one is left.
        assert!(log.iter().all(|(_, goes)| *goes) && log.iter().map(|(number, _)| *number).is_sorted());
        assert!((1..=2).contains(&log.len()), "{log:?}");
    });
}

#[test]
fn shut_ends_each_waiting_request_once() {
    loom::model(|| {
        let (queue, log) = queue(0);
        enter(&queue, 1, &log);
        let other = {
            let (queue, log) = (Arc::clone(&queue), Arc::clone(&log));
            thread::spawn(move || {
                enter(&queue, 2, &log);
                queue.set(|_| Some(FixedPace(1)));
                dispatch_all(&queue);
            })
        };
        queue.shut();
        other.join().unwrap();
        let mut log: Vec<u32> = log.lock().unwrap().iter().map(|(number, _)| *number).collect();
        log.sort_unstable();
        assert_eq!(log, [1, 2]);
    });
}
