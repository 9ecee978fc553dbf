//! Discrete-event simulation of threads, each on its own core, that share one lock.
//!
//! An operation visits the lock several times, with work outside before each visit. Times are in
//! nanoseconds. Nothing is fitted: all numbers are inputs.

use std::collections::VecDeque;

use freestone_benches::data::Random;

use super::events::{Events, Picos, VISITS, jittered, picos};

/// Rule that decides which thread acquires the lock next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discipline {
    /// Order of arrival. The cache line moves from core to core.
    InTurn,
    /// std's mutex over a futex: a thread that arrives while the lock is free acquires it, waiters
    /// spin and then sleep, and a release wakes one sleeper.
    Parking,
}

/// Costs of the machine apart from the work itself, in nanoseconds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Costs {
    /// Transfer of a cache line that another core wrote last.
    pub line: f64,
    /// Time that a waiter spins before it sleeps.
    pub spin: f64,
    /// Duration of the call that wakes a sleeper.
    pub wake: f64,
    /// Duration of the call if no thread sleeps.
    pub wake_nobody: f64,
    /// Time from the call until the sleeper runs.
    pub wake_latency: f64,
}

/// Times of one operation, in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct Operation {
    /// Time outside of the lock, of all visits together.
    pub outside: f64,
    /// Time under the lock, of all visits together.
    pub hold_time: f64,
    /// Number of times that an operation acquires the lock.
    pub visits: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The thread needs the lock.
    Arrive,
    Release,
    /// A spinning thread notices a release.
    Try,
    /// A thread has spun long enough. The number identifies the wait.
    GiveUp(u64),
    /// A sleeping thread runs again.
    Woken,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Thread {
    Running,
    /// Spins. The number identifies the wait.
    Spinning(u64),
    Sleeping,
}

struct Simulation {
    discipline: Discipline,
    costs: Costs,
    /// Times per visit.
    outside: f64,
    hold_time: f64,
    events: Events<Event>,
    threads: Vec<Thread>,
    /// True for threads that have slept or after which other threads may sleep. These threads
    /// acquire the lock in the state "with sleepers".
    marks: Vec<bool>,
    waiting: VecDeque<usize>,
    is_locked: bool,
    /// True if a thread may sleep: the lock's state "with sleepers".
    has_sleepers: bool,
    last: usize,
    visits: u64,
    waits: u64,
    random: Random,
}

pub fn speed(operation: Operation, discipline: Discipline, costs: Costs, threads: usize) -> f64 {
    let mut simulation = Simulation {
        discipline,
        costs,
        outside: operation.outside / operation.visits,
        hold_time: operation.hold_time / operation.visits,
        events: Events::new(),
        threads: vec![Thread::Running; threads],
        marks: vec![false; threads],
        waiting: VecDeque::new(),
        is_locked: false,
        has_sleepers: false,
        last: 0,
        visits: 0,
        waits: 0,
        random: Random::new(threads as u64),
    };
    for thread in 0..threads {
        let at = simulation.outside_time();
        simulation.events.plan(at, thread, Event::Arrive);
    }
    let started = simulation.run_until(VISITS);
    let ended = simulation.run_until(2 * VISITS);
    VISITS as f64 / operation.visits / ((ended - started) as f64 * 1e-12)
}

impl Simulation {
    fn run_until(&mut self, visits: u64) -> Picos {
        while let Some((now, thread, event)) = self.events.next() {
            self.handle_event(now, thread, event);
            if self.visits >= visits {
                return now;
            }
        }
        unreachable!("every thread has a pending event, or another thread will wake it")
    }

    fn handle_event(&mut self, now: Picos, thread: usize, event: Event) {
        match event {
            Event::Arrive => {
                self.marks[thread] = false;
                self.acquire_or_wait(now, thread);
            }
            Event::Release => self.release(now, thread),
            Event::Try => {
                if matches!(self.threads[thread], Thread::Spinning(_)) && !self.is_locked {
                    self.take(now, thread);
                }
            }
            Event::GiveUp(wait) => {
                if self.threads[thread] == Thread::Spinning(wait) {
                    self.marks[thread] = true;
                    if self.is_locked { self.sleep(thread) } else { self.take(now, thread) }
                }
            }
            Event::Woken => {
                self.marks[thread] = true;
                self.acquire_or_wait(now, thread);
            }
        }
    }

    fn acquire_or_wait(&mut self, now: Picos, thread: usize) {
        if !self.is_locked {
            self.take(now, thread);
        } else if self.discipline == Discipline::InTurn {
            self.waiting.push_back(thread);
        } else if self.has_sleepers {
            // If a thread sleeps already, new waiters do not spin.
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
        (self.is_locked, self.has_sleepers, self.last) = (true, self.marks[thread], thread);
        self.events.plan(now + picos(self.hold_time + line), thread, Event::Release);
    }

    fn sleep(&mut self, thread: usize) {
        self.has_sleepers = true;
        self.threads[thread] = Thread::Sleeping;
        self.waiting.push_back(thread);
    }

    fn release(&mut self, now: Picos, thread: usize) {
        self.visits += 1;
        self.is_locked = false;
        let mut busy = 0.0;
        match self.discipline {
            Discipline::InTurn => {
                if let Some(next) = self.waiting.pop_front() {
                    self.take(now, next);
                }
            }
            Discipline::Parking => {
                if self.has_sleepers {
                    busy = self.costs.wake_nobody;
                    if let Some(sleeper) = self.waiting.pop_front() {
                        busy = self.costs.wake;
                        self.events.plan(now + picos(self.costs.wake_latency), sleeper, Event::Woken);
                    }
                }
                self.has_sleepers = false;
                for other in 0..self.threads.len() {
                    if matches!(self.threads[other], Thread::Spinning(_)) {
                        self.events.plan(now + picos(self.costs.line), other, Event::Try);
                    }
                }
            }
        }
        let at = now + picos(busy) + self.outside_time();
        self.events.plan(at, thread, Event::Arrive);
    }

    fn outside_time(&mut self) -> Picos {
        jittered(self.outside, &mut self.random)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPERATION: Operation = Operation { outside: 300.0, hold_time: 100.0, visits: 1.0 };

    fn near(a: f64, b: f64, by: f64) {
        assert!((a / b - 1.0).abs() < by, "{a} is not {b}");
    }

    #[test]
    fn single_thread_has_no_contention() {
        for discipline in [Discipline::InTurn, Discipline::Parking] {
            let costs = Costs { line: 1e4, spin: 1e3, wake: 1e5, wake_nobody: 1e5, wake_latency: 1e6 };
            near(speed(OPERATION, discipline, costs, 1), 1e9 / 400.0, 0.01);
            let operation = Operation { visits: 3.0, ..OPERATION };
            near(speed(operation, discipline, costs, 1), 1e9 / 400.0, 0.01);
        }
    }

    #[test]
    fn throughput_saturates_at_inverse_hold_time() {
        for threads in [8, 16, 48] {
            near(speed(OPERATION, Discipline::InTurn, Costs::default(), threads), 1e9 / 100.0, 0.01);
            // The hold time includes the transfer of the cache line if another thread held the lock
            // before.
            let costs = Costs { line: 60.0, ..Costs::default() };
            near(speed(OPERATION, Discipline::InTurn, costs, threads), 1e9 / 160.0, 0.01);
        }
    }

    #[test]
    fn rarely_held_lock_scales_with_threads() {
        let operation = Operation { outside: 1e6, hold_time: 1.0, visits: 1.0 };
        for threads in [2, 4, 48] {
            for discipline in [Discipline::InTurn, Discipline::Parking] {
                let costs = Costs { spin: 1e3, ..Costs::default() };
                near(speed(operation, discipline, costs, threads), threads as f64 * 1e9 / 1_000_001.0, 0.02);
            }
        }
    }

    #[test]
    fn two_threads_in_turn_lie_between_bounds() {
        // Upper bound: two threads without contention. Lower bound: each always waits for a whole
        // hold.
        let two = speed(OPERATION, Discipline::InTurn, Costs::default(), 2);
        assert!(two < 2e9 / 400.0 && two > 2e9 / 500.0, "{two}");
    }

    #[test]
    fn waking_sleepers_costs_the_releasing_thread() {
        // Waiters do not spin, and work outside is short: every release has a sleeper to wake.
        let operation = Operation { outside: 10.0, hold_time: 1000.0, visits: 1.0 };
        let costs = Costs { wake: 2000.0, wake_nobody: 100.0, wake_latency: 50_000.0, ..Costs::default() };
        let two = speed(operation, Discipline::Parking, costs, 2);
        assert!(two < 1e9 / 1000.0 && two > 1e9 / 4000.0, "{two}");
        let free = speed(operation, Discipline::Parking, Costs { spin: 1e9, ..Costs::default() }, 2);
        near(free, 1e9 / 1000.0, 0.02);
    }
}
