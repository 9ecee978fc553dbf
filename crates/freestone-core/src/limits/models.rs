//! loom models of a paced queue: requests wait while limits are set and removed.

use std::time::Duration;

use loom::sync::Mutex as LoomMutex;
use loom::thread;

use super::paced_queue::{Cost, DispatchResult, EnterResult, Pace, PacedQueue, PacedRequest};
use crate::sync::{Arc, AtomicU32};

/// A pace that lets a fixed number of requests pay.
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

/// A request that records its number, with true if it continued and false if it was rejected.
struct TestRequest(u32, Arc<LoomMutex<Vec<(u32, bool)>>>);

impl PacedRequest for TestRequest {
    fn note_wait(&mut self) {}
    fn resume(self) {
        self.1.lock().unwrap().push((self.0, true));
    }
    fn reject(self) {
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
        EnterResult::Admitted(request) => request.resume(),
        EnterResult::Rejected(request) => request.reject(),
        EnterResult::First(_) | EnterResult::Queued => {}
    }
}

/// Dispatches until no request can continue now, as the timer and the dispatching thread do.
fn dispatch_all(queue: &Shared) {
    while queue.dispatch(1) == DispatchResult::More {}
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
        // A thread that found the other thread dispatching has left the requests to it.
        assert_eq!(*log.lock().unwrap(), [(1, true), (2, true), (3, true)]);
        assert!(!queue.is_active());
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
        // With the rates that were set last, one or two requests have continued, and no request that can pay
        // is left.
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
