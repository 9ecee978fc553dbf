use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::line::{Entered, Line, Next, Pace};
use super::{Cost, Limiter, Limits, Waits};
use crate::sync::{Arc, AtomicU32, Ordering};

const PATIENCE: Duration = Duration::from_secs(60);

/// What became of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Waits(u32),
    Goes(u32),
    Gone(u32),
}

struct Job(u32, mpsc::Sender<Told>);

impl Waits for Job {
    fn waits(&mut self) {
        self.1.send(Told::Waits(self.0)).unwrap();
    }
    fn go(self) {
        self.1.send(Told::Goes(self.0)).unwrap();
    }
    fn gone(self) {
        self.1.send(Told::Gone(self.0)).unwrap();
    }
}

/// So many operations are there.
struct Purse(u64);

impl Pace for Purse {
    fn pay(&mut self, owed: &mut Cost) -> Result<(), Duration> {
        let paid = owed.operations.min(self.0);
        self.0 -= paid;
        owed.operations -= paid;
        if owed.operations == 0 { Ok(()) } else { Err(PATIENCE) }
    }
}

const ONE: Cost = Cost { operations: 1, bytes: 0 };

fn all(told: &mpsc::Receiver<Told>) -> Vec<Told> {
    told.try_iter().collect()
}

#[test]
fn those_that_wait_go_on_in_order_and_nobody_gets_by() {
    let any = Arc::new(AtomicU32::new(0));
    let line = Line::<Job, Purse>::new(Arc::clone(&any));
    let (tell, told) = mpsc::channel();
    let enter = |number, cost| match line.enter(Job(number, tell.clone()), cost) {
        Entered::Goes(job) => job.go(),
        Entered::Gone(job) => job.gone(),
        Entered::First(_) | Entered::Waits => {}
    };
    assert!(!line.is_on());
    enter(0, ONE);
    line.set(|_| Some(Purse(2)));
    assert!(line.is_on() && any.load(Ordering::SeqCst) == 1);
    enter(1, ONE);
    // Pays one, and owes two.
    enter(2, Cost { operations: 3, bytes: 0 });
    enter(3, ONE);
    let (goes, waits) = (Told::Goes, Told::Waits);
    assert_eq!(all(&told), [goes(0), goes(1), waits(2), waits(3)]);
    assert_eq!(line.carry_on(9), Next::After(PATIENCE));
    line.set(|waits| Some(Purse(if waits { 1 } else { 100 })));
    assert_eq!(line.carry_on(9), Next::After(PATIENCE));
    line.set(|_| Some(Purse(2)));
    enter(4, ONE);
    assert_eq!(line.carry_on(1), Next::Again);
    assert_eq!(all(&told), [waits(4), goes(2)], "what was paid by the rates before counts");
    // What waits keeps the line on.
    line.set(|_| None);
    enter(5, ONE);
    assert!(line.is_on());
    assert_eq!(line.carry_on(9), Next::Nothing);
    assert_eq!(all(&told), [waits(5), goes(3), goes(4), goes(5)]);
    assert!(!line.is_on() && any.load(Ordering::SeqCst) == 0);
}

#[test]
fn who_waits_is_gone_when_it_ends_and_goes_on_when_limits_are_lifted() {
    let line = Line::<Job, Purse>::new(Arc::default());
    let (tell, told) = mpsc::channel();
    let enter = |number| match line.enter(Job(number, tell.clone()), ONE) {
        Entered::Goes(job) => job.go(),
        Entered::Gone(job) => job.gone(),
        Entered::First(_) | Entered::Waits => {}
    };
    let (goes, waits, gone) = (Told::Goes, Told::Waits, Told::Gone);
    line.set(|_| Some(Purse(0)));
    (1..=4).for_each(enter);
    line.end_those(|job| job.0 == 3);
    line.end();
    enter(5);
    line.begin();
    assert_eq!(
        all(&told),
        [waits(1), waits(2), waits(3), waits(4), gone(3), gone(1), gone(2), gone(4), gone(5)]
    );
    enter(6);
    line.lift();
    // Behind the one that still waits.
    enter(7);
    assert_eq!(line.carry_on(9), Next::Nothing);
    enter(8);
    line.lay();
    enter(9);
    assert_eq!(all(&told), [waits(6), waits(7), goes(6), goes(7), goes(8), waits(9)]);
}

fn enter(limiter: &Limiter<Job>, number: u32, tell: &mpsc::Sender<Told>) {
    if let Some(job) = limiter.enter(Job(number, tell.clone()), ONE) {
        job.go();
    }
}

#[test]
fn a_limiter_wakes_who_waits_in_time_and_heeds_a_change() {
    let limiter = Limiter::new(Arc::default());
    let (tell, told) = mpsc::channel();
    let per_second = |iops| Limits { iops, iops_burst: 1, ..Limits::default() };
    limiter.set(&per_second(100)).unwrap();
    let begun = Instant::now();
    (0..11).for_each(|number| enter(&limiter, number, &tell));
    let next = || loop {
        match told.recv_timeout(PATIENCE).unwrap() {
            Told::Waits(_) => {}
            Told::Goes(number) => return number,
            Told::Gone(number) => panic!("{number} is gone"),
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
    // What waits for an hour goes on when the limit is raised, and when it goes.
    limiter.set(&Limits { iops: 1, iops_burst: 1, ..Limits::default() }).unwrap();
    (0..10_000).for_each(|number| enter(&limiter, number, &tell));
    limiter.set(&per_second(1_000_000)).unwrap();
    (0..10_000).for_each(|number| assert_eq!(next(), number));
    limiter.set(&per_second(1)).unwrap();
    (0..100).for_each(|number| enter(&limiter, number, &tell));
    limiter.set(&Limits::default()).unwrap();
    (0..100).for_each(|number| assert_eq!(next(), number));
    while limiter.is_on() {
        std::thread::yield_now();
    }
    assert_eq!(limiter.limits(), Limits::default());
}
