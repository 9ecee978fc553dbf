use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::paced_queue::{DispatchResult, EnterResult, Pace, PacedQueue};
use super::{Cost, Limiter, Limits, PacedRequest};
use crate::sync::{Arc, AtomicU32, Ordering};

const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Waits(u32),
    Goes(u32),
    Gone(u32),
}

struct TestRequest(u32, mpsc::Sender<Event>);

impl PacedRequest for TestRequest {
    fn note_wait(&mut self) {
        self.1.send(Event::Waits(self.0)).unwrap();
    }
    fn resume(self) {
        self.1.send(Event::Goes(self.0)).unwrap();
    }
    fn reject(self) {
        self.1.send(Event::Gone(self.0)).unwrap();
    }
}

/// A pace that lets a fixed number of operations be paid.
struct FixedPace(u64);

impl Pace for FixedPace {
    fn pay(&mut self, owed: &mut Cost) -> Result<(), Duration> {
        let paid = owed.operations.min(self.0);
        self.0 -= paid;
        owed.operations -= paid;
        if owed.operations == 0 { Ok(()) } else { Err(PATIENCE) }
    }
}

const ONE: Cost = Cost { operations: 1, bytes: 0 };

fn drain(events: &mpsc::Receiver<Event>) -> Vec<Event> {
    events.try_iter().collect()
}

#[test]
fn waiting_requests_continue_in_order() {
    let any = Arc::new(AtomicU32::new(0));
    let queue = PacedQueue::<TestRequest, FixedPace>::new(Arc::clone(&any));
    let (tx, rx) = mpsc::channel();
    let enter = |number, cost| match queue.enter(TestRequest(number, tx.clone()), cost) {
        EnterResult::Admitted(request) => request.resume(),
        EnterResult::Rejected(request) => request.reject(),
        EnterResult::First(_) | EnterResult::Queued => {}
    };
    assert!(!queue.is_active());
    enter(0, ONE);
    queue.set(|_| Some(FixedPace(2)));
    assert!(queue.is_active() && any.load(Ordering::SeqCst) == 1);
    enter(1, ONE);
    // The request pays one operation now, and owes two.
    enter(2, Cost { operations: 3, bytes: 0 });
    enter(3, ONE);
    let (goes, waits) = (Event::Goes, Event::Waits);
    assert_eq!(drain(&rx), [goes(0), goes(1), waits(2), waits(3)]);
    assert_eq!(queue.dispatch(9), DispatchResult::After(PATIENCE));
    queue.set(|waits| Some(FixedPace(if waits { 1 } else { 100 })));
    assert_eq!(queue.dispatch(9), DispatchResult::After(PATIENCE));
    queue.set(|_| Some(FixedPace(2)));
    enter(4, ONE);
    assert_eq!(queue.dispatch(1), DispatchResult::More);
    assert_eq!(drain(&rx), [waits(4), goes(2)], "payments under the earlier rates count");
    // Waiting requests keep the queue active.
    queue.set(|_| None);
    enter(5, ONE);
    assert!(queue.is_active());
    assert_eq!(queue.dispatch(9), DispatchResult::Idle);
    assert_eq!(drain(&rx), [waits(5), goes(3), goes(4), goes(5)]);
    assert!(!queue.is_active() && any.load(Ordering::SeqCst) == 0);
}

#[test]
fn shut_rejects_and_suspend_admits_waiting_requests() {
    let queue = PacedQueue::<TestRequest, FixedPace>::new(Arc::default());
    let (tx, rx) = mpsc::channel();
    let enter = |number| match queue.enter(TestRequest(number, tx.clone()), ONE) {
        EnterResult::Admitted(request) => request.resume(),
        EnterResult::Rejected(request) => request.reject(),
        EnterResult::First(_) | EnterResult::Queued => {}
    };
    let (goes, waits, gone) = (Event::Goes, Event::Waits, Event::Gone);
    queue.set(|_| Some(FixedPace(0)));
    (1..=4).for_each(enter);
    queue.reject_matching(|request| request.0 == 3);
    queue.shut();
    enter(5);
    queue.reopen();
    assert_eq!(
        drain(&rx),
        [waits(1), waits(2), waits(3), waits(4), gone(3), gone(1), gone(2), gone(4), gone(5)]
    );
    enter(6);
    queue.suspend();
    // Request 7 is queued behind request 6, which still waits.
    enter(7);
    assert_eq!(queue.dispatch(9), DispatchResult::Idle);
    enter(8);
    queue.resume();
    enter(9);
    assert_eq!(drain(&rx), [waits(6), waits(7), goes(6), goes(7), goes(8), waits(9)]);
}

fn enter(limiter: &Limiter<TestRequest>, number: u32, tx: &mpsc::Sender<Event>) {
    if let Some(request) = limiter.enter(TestRequest(number, tx.clone()), ONE) {
        request.resume();
    }
}

#[test]
fn limiter_dispatches_on_time_and_after_change() {
    let limiter = Limiter::new(Arc::default());
    let (tx, rx) = mpsc::channel();
    let per_second = |iops| Limits { iops, iops_burst: 1, ..Limits::default() };
    limiter.set(&per_second(100)).unwrap();
    let begun = Instant::now();
    (0..11).for_each(|number| enter(&limiter, number, &tx));
    let next = || loop {
        match rx.recv_timeout(PATIENCE).unwrap() {
            Event::Waits(_) => {}
            Event::Goes(number) => return number,
            Event::Gone(number) => panic!("{number} was rejected"),
        }
    };
    for number in 0..11 {
        assert_eq!(next(), number);
        assert!(
            begun.elapsed() >= Duration::from_millis(10) * number,
            "{number} after {:?}",
            begun.elapsed()
        );
    }
    // Requests that would wait for hours continue when the limit is raised or removed.
    limiter.set(&Limits { iops: 1, iops_burst: 1, ..Limits::default() }).unwrap();
    (0..10_000).for_each(|number| enter(&limiter, number, &tx));
    limiter.set(&per_second(1_000_000)).unwrap();
    (0..10_000).for_each(|number| assert_eq!(next(), number));
    limiter.set(&per_second(1)).unwrap();
    (0..100).for_each(|number| enter(&limiter, number, &tx));
    limiter.set(&Limits::default()).unwrap();
    (0..100).for_each(|number| assert_eq!(next(), number));
    while limiter.is_active() {
        std::thread::yield_now();
    }
    assert_eq!(limiter.limits(), Limits::default());
}
