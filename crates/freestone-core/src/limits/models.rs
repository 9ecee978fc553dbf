//! loom models: who waits while limits come and go.

use std::time::Duration;

use loom::sync::Mutex as LoomMutex;
use loom::thread;

use super::line::{Cost, Entered, Line, Next, Pace, Waits};
use crate::sync::{Arc, AtomicU32};

/// So many operations are there.
struct Purse(u64);

impl Pace for Purse {
    fn pay(&mut self, owed: &mut Cost) -> Result<(), Duration> {
        if self.0 == 0 {
            return Err(Duration::ZERO);
        }
        self.0 -= 1;
        owed.operations = 0;
        Ok(())
    }
}

/// Notes when it goes on, and when it is gone.
struct Job(u32, Arc<LoomMutex<Vec<(u32, bool)>>>);

impl Waits for Job {
    fn waits(&mut self) {}
    fn go(self) {
        self.1.lock().unwrap().push((self.0, true));
    }
    fn gone(self) {
        self.1.lock().unwrap().push((self.0, false));
    }
}

type Noted = Arc<LoomMutex<Vec<(u32, bool)>>>;
type Shared = Arc<Line<Job, Purse>>;

fn line(operations: u64) -> (Shared, Noted) {
    let line = Line::new(Arc::new(AtomicU32::new(0)));
    line.set(|_| Some(Purse(operations)));
    (Arc::new(line), Arc::new(LoomMutex::new(Vec::new())))
}

fn enter(line: &Shared, number: u32, noted: &Noted) {
    match line.enter(Job(number, Arc::clone(noted)), Cost { operations: 1, bytes: 0 }) {
        Entered::Goes(job) => job.go(),
        Entered::Gone(job) => job.gone(),
        Entered::First(_) | Entered::Waits => {}
    }
}

/// As a timer and the thread would, until there is nothing to do for now.
fn carry_on(line: &Shared) {
    while line.carry_on(1) == Next::Again {}
}

#[test]
fn one_caller_keeps_its_order_while_a_limit_goes() {
    loom::model(|| {
        let (line, noted) = line(0);
        enter(&line, 1, &noted);
        let others = {
            let line = Arc::clone(&line);
            thread::spawn(move || {
                line.set(|_| None);
                carry_on(&line);
            })
        };
        enter(&line, 2, &noted);
        enter(&line, 3, &noted);
        others.join().unwrap();
        // A thread that found the other carrying on left it to that one.
        assert_eq!(*noted.lock().unwrap(), [(1, true), (2, true), (3, true)]);
        assert!(!line.is_on());
    });
}

#[test]
fn two_that_carry_on_forget_nobody() {
    loom::model(|| {
        let (line, noted) = line(0);
        enter(&line, 1, &noted);
        enter(&line, 2, &noted);
        let other = {
            let line = Arc::clone(&line);
            thread::spawn(move || {
                line.set(|_| Some(Purse(1)));
                carry_on(&line);
            })
        };
        line.set(|_| Some(Purse(2)));
        carry_on(&line);
        other.join().unwrap();
        let noted = noted.lock().unwrap().clone();
        // By the rates that came last one or two have gone on, and none is left that could.
        assert!(noted.iter().all(|(_, goes)| *goes) && noted.iter().map(|(number, _)| *number).is_sorted());
        assert!((1..=2).contains(&noted.len()), "{noted:?}");
    });
}

#[test]
fn each_that_waits_is_told_once_when_it_ends() {
    loom::model(|| {
        let (line, noted) = line(0);
        enter(&line, 1, &noted);
        let other = {
            let (line, noted) = (Arc::clone(&line), Arc::clone(&noted));
            thread::spawn(move || {
                enter(&line, 2, &noted);
                line.set(|_| Some(Purse(1)));
                carry_on(&line);
            })
        };
        line.end();
        other.join().unwrap();
        let mut noted: Vec<u32> = noted.lock().unwrap().iter().map(|(number, _)| *number).collect();
        noted.sort_unstable();
        assert_eq!(noted, [1, 2]);
    });
}
