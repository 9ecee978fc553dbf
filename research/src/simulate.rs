//! A small discrete-event simulation: threads, each on a core of its own, that share one lock.
//!
//! An operation is some visits to the lock with work outside before each. Time is in nanoseconds.
//! Nothing here is fitted: all numbers come in from outside.

use std::collections::VecDeque;

use freestone_benches::data::Random;

use crate::events::{Events, Picos, VISITS, around, picos};

/// Who gets the lock next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discipline {
    /// In the order of arrival, as a cache line goes from core to core.
    InTurn,
    /// As std's mutex over a futex: who comes along while it is free takes it, waiters look for a
    /// while and then sleep, and who lets go wakes one of them.
    Parking,
}

/// What the machine takes for what is not the work itself, in nanoseconds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Costs {
    /// A cache line that another core wrote last comes over.
    pub line: f64,
    /// A waiter looks for so long before it sleeps.
    pub spin: f64,
    /// The call that wakes a sleeper, for the one that calls.
    pub wake: f64,
    /// The same call where nobody sleeps any more.
    pub wake_nobody: f64,
    /// From that call until the sleeper runs.
    pub wake_latency: f64,
}

/// One operation, in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// Outside of the lock, all visits together.
    pub outside: f64,
    /// Under the lock, all visits together.
    pub held: f64,
    /// How often the lock is taken.
    pub visits: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// Wants the lock.
    Arrive,
    /// Lets it go.
    Release,
    /// Has seen that it was let go.
    Try,
    /// Has looked for long enough; the number says which wait it belongs to.
    GiveUp(u64),
    /// Runs again.
    Woken,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Thread {
    Running,
    /// Looks at the lock; by the number of the wait.
    Spinning(u64),
    Sleeping,
}

struct Simulation {
    discipline: Discipline,
    costs: Costs,
    /// Of one visit.
    outside: f64,
    held: f64,
    events: Events<Event>,
    threads: Vec<Thread>,
    /// It slept, or may have to be followed by somebody who sleeps: takes the lock as one with
    /// sleepers.
    marks: Vec<bool>,
    waiting: VecDeque<usize>,
    taken: bool,
    /// Somebody may sleep.
    marked: bool,
    /// Who had the lock last.
    last: usize,
    visits: u64,
    waits: u64,
    random: Random,
}

/// Operations a second of all threads.
pub fn speed(work: Work, discipline: Discipline, costs: Costs, threads: usize) -> f64 {
    let mut simulation = Simulation {
        discipline,
        costs,
        outside: work.outside / work.visits,
        held: work.held / work.visits,
        events: Events::new(),
        threads: vec![Thread::Running; threads],
        marks: vec![false; threads],
        waiting: VecDeque::new(),
        taken: false,
        marked: false,
        last: 0,
        visits: 0,
        waits: 0,
        random: Random::new(threads as u64),
    };
    for thread in 0..threads {
        let at = simulation.think();
        simulation.events.plan(at, thread, Event::Arrive);
    }
    let begun = simulation.run_until(VISITS);
    let ended = simulation.run_until(2 * VISITS);
    VISITS as f64 / work.visits / ((ended - begun) as f64 * 1e-12)
}

impl Simulation {
    fn run_until(&mut self, visits: u64) -> Picos {
        while let Some((now, thread, event)) = self.events.next() {
            self.happen(now, thread, event);
            if self.visits >= visits {
                return now;
            }
        }
        unreachable!("a thread always has an event to come, or another one that will wake it")
    }

    fn happen(&mut self, now: Picos, thread: usize, event: Event) {
        match event {
            Event::Arrive => {
                self.marks[thread] = false;
                self.want(now, thread);
            }
            Event::Release => self.release(now, thread),
            Event::Try => {
                if matches!(self.threads[thread], Thread::Spinning(_)) && !self.taken {
                    self.take(now, thread);
                }
            }
            Event::GiveUp(wait) => {
                if self.threads[thread] == Thread::Spinning(wait) {
                    self.marks[thread] = true;
                    if self.taken { self.sleep(thread) } else { self.take(now, thread) }
                }
            }
            Event::Woken => {
                self.marks[thread] = true;
                self.want(now, thread);
            }
        }
    }

    fn want(&mut self, now: Picos, thread: usize) {
        if !self.taken {
            self.take(now, thread);
        } else if self.discipline == Discipline::InTurn {
            self.waiting.push_back(thread);
        } else if self.marked {
            // Where somebody sleeps already, nobody looks first.
            self.sleep(thread);
        } else {
            self.waits += 1;
            self.threads[thread] = Thread::Spinning(self.waits);
            self.events.plan(now + picos(self.costs.spin), thread, Event::GiveUp(self.waits));
        }
    }

    fn take(&mut self, now: Picos, thread: usize) {
        let line = if self.last == thread { 0.0 } else { self.costs.line };
        self.threads[thread] = Thread::Running;
        (self.taken, self.marked, self.last) = (true, self.marks[thread], thread);
        self.events.plan(now + picos(self.held + line), thread, Event::Release);
    }

    fn sleep(&mut self, thread: usize) {
        self.marked = true;
        self.threads[thread] = Thread::Sleeping;
        self.waiting.push_back(thread);
    }

    fn release(&mut self, now: Picos, thread: usize) {
        self.visits += 1;
        self.taken = false;
        let mut busy = 0.0;
        match self.discipline {
            Discipline::InTurn => {
                if let Some(next) = self.waiting.pop_front() {
                    self.take(now, next);
                }
            }
            Discipline::Parking => {
                if self.marked {
                    busy = self.costs.wake_nobody;
                    if let Some(sleeper) = self.waiting.pop_front() {
                        busy = self.costs.wake;
                        self.events.plan(now + picos(self.costs.wake_latency), sleeper, Event::Woken);
                    }
                }
                self.marked = false;
                for other in 0..self.threads.len() {
                    if matches!(self.threads[other], Thread::Spinning(_)) {
                        self.events.plan(now + picos(self.costs.line), other, Event::Try);
                    }
                }
            }
        }
        let at = now + picos(busy) + self.think();
        self.events.plan(at, thread, Event::Arrive);
    }

    fn think(&mut self) -> Picos {
        around(self.outside, &mut self.random)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: Work = Work { outside: 300.0, held: 100.0, visits: 1.0 };

    fn near(a: f64, b: f64, by: f64) {
        assert!((a / b - 1.0).abs() < by, "{a} is not {b}");
    }

    #[test]
    fn one_thread_takes_its_own_time() {
        for discipline in [Discipline::InTurn, Discipline::Parking] {
            let costs = Costs { line: 1e4, spin: 1e3, wake: 1e5, wake_nobody: 1e5, wake_latency: 1e6 };
            near(speed(WORK, discipline, costs, 1), 1e9 / 400.0, 0.01);
            let work = Work { visits: 3.0, ..WORK };
            near(speed(work, discipline, costs, 1), 1e9 / 400.0, 0.01);
        }
    }

    #[test]
    fn one_server_saturates_at_one_over_its_hold() {
        for threads in [8, 16, 48] {
            near(speed(WORK, Discipline::InTurn, Costs::default(), threads), 1e9 / 100.0, 0.01);
            // With the line's way in it where another thread had it before.
            let costs = Costs { line: 60.0, ..Costs::default() };
            near(speed(WORK, Discipline::InTurn, costs, threads), 1e9 / 160.0, 0.01);
        }
    }

    #[test]
    fn a_lock_that_is_hardly_held_scales_with_the_threads() {
        let work = Work { outside: 1e6, held: 1.0, visits: 1.0 };
        for threads in [2, 4, 48] {
            for discipline in [Discipline::InTurn, Discipline::Parking] {
                let costs = Costs { spin: 1e3, ..Costs::default() };
                near(speed(work, discipline, costs, threads), threads as f64 * 1e9 / 1_000_001.0, 0.02);
            }
        }
    }

    #[test]
    fn two_threads_in_turn_lie_between_both_bounds() {
        // Both alone at twice the speed is the upper bound; the lower one is that each always waits
        // for a whole hold.
        let two = speed(WORK, Discipline::InTurn, Costs::default(), 2);
        assert!(two < 2e9 / 400.0 && two > 2e9 / 500.0, "{two}");
    }

    #[test]
    fn sleepers_are_woken_and_cost_the_one_that_wakes() {
        // Nobody looks before it sleeps, and work outside is short: whoever lets go has somebody to
        // wake.
        let work = Work { outside: 10.0, held: 1000.0, visits: 1.0 };
        let costs = Costs { wake: 2000.0, wake_nobody: 100.0, wake_latency: 50_000.0, ..Costs::default() };
        let two = speed(work, Discipline::Parking, costs, 2);
        assert!(two < 1e9 / 1000.0 && two > 1e9 / 4000.0, "{two}");
        let free = speed(work, Discipline::Parking, Costs { spin: 1e9, ..Costs::default() }, 2);
        near(free, 1e9 / 1000.0, 0.02);
    }
}
