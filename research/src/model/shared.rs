//! Discrete-event simulation of a spinning read-write lock over a whole table. Threads, each on its
//! own core, read or write pages. Readers share the lock. Waiters do not queue, so a reader passes
//! a waiting writer, as with the kernel's lock at the time of the experiment.
//!
//! Times are in nanoseconds. Nothing is fitted: all numbers are inputs.

use freestone_benches::data::Random;

use super::events::{Events, Picos, VISITS, jittered, picos};

/// Times of one page, in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct Visit {
    pub outside: f64,
    pub hold_time: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mix {
    /// Even threads (the first is 0) read, odd threads write.
    ByThread,
    /// Every thread chooses to read or to write at random, each time for this number of pages.
    ByPages(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A thread needs the lock.
    Arrive,
    Release,
    /// A waiting thread notices a release.
    Try,
}

struct Thread {
    reads: bool,
    /// Pages until the next random choice.
    left: u32,
    waits: bool,
}

struct Simulation {
    read: Visit,
    write: Visit,
    mix: Mix,
    line: f64,
    events: Events<Event>,
    threads: Vec<Thread>,
    readers: usize,
    writer: bool,
    /// Time from which thread `last` owns the lock's cache line.
    line_free: Picos,
    last: usize,
    visits: u64,
    random: Random,
}

/// Returns the pages per second of all threads. `line` is the transfer time of a cache line between
/// cores.
pub fn speed(read: Visit, write: Visit, mix: Mix, line: f64, threads: usize) -> f64 {
    let mut simulation = Simulation {
        read,
        write,
        mix,
        line,
        events: Events::new(),
        threads: (0..threads)
            .map(|thread| Thread { reads: thread % 2 == 0, left: 0, waits: false })
            .collect(),
        readers: 0,
        writer: false,
        line_free: 0,
        last: 0,
        visits: 0,
        random: Random::new(threads as u64),
    };
    for thread in 0..threads {
        simulation.schedule_outside_work(0, thread);
    }
    let started = simulation.run_until(VISITS);
    let ended = simulation.run_until(2 * VISITS);
    VISITS as f64 / ((ended - started) as f64 * 1e-12)
}

impl Simulation {
    fn run_until(&mut self, visits: u64) -> Picos {
        while let Some((now, thread, event)) = self.events.next() {
            match event {
                Event::Arrive => self.acquire_or_wait(now, thread),
                // Two releases may follow each other before the waiter runs, so the thread may no
                // longer wait.
                Event::Try if self.threads[thread].waits => self.acquire_or_wait(now, thread),
                Event::Try => {}
                Event::Release => self.release(now, thread),
            }
            if self.visits >= visits {
                return now;
            }
        }
        unreachable!("a waiting thread always has a running holder")
    }

    fn acquire_or_wait(&mut self, now: Picos, thread: usize) {
        let reads = self.threads[thread].reads;
        let is_free = !self.writer && (reads || self.readers == 0);
        self.threads[thread].waits = !is_free;
        if !is_free {
            return;
        }
        let hold_time = if reads {
            self.readers += 1;
            self.read.hold_time
        } else {
            self.writer = true;
            self.write.hold_time
        };
        let at = self.change_word(now, thread) + picos(hold_time);
        self.events.plan(at, thread, Event::Release);
    }

    fn release(&mut self, now: Picos, thread: usize) {
        self.visits += 1;
        if self.threads[thread].reads {
            self.readers -= 1;
        } else {
            self.writer = false;
        }
        let at = self.change_word(now, thread);
        for other in 0..self.threads.len() {
            if self.threads[other].waits {
                self.events.plan(at + picos(self.line), other, Event::Try);
            }
        }
        self.schedule_outside_work(at, thread);
    }

    /// Changes the word of the lock. The cache line is transferred if another core owned the line,
    /// after pending changes. Returns the time of the change.
    fn change_word(&mut self, now: Picos, thread: usize) -> Picos {
        let line = if self.last == thread { 0.0 } else { self.line };
        self.last = thread;
        self.line_free = now.max(self.line_free) + picos(line);
        self.line_free
    }

    /// Schedules the work outside of the lock, which precedes each visit.
    fn schedule_outside_work(&mut self, now: Picos, thread: usize) {
        let of = &mut self.threads[thread];
        if let Mix::ByPages(pages) = self.mix {
            if of.left == 0 {
                of.reads = self.random.next_u64() >> 63 == 0;
                of.left = pages;
            }
            of.left -= 1;
        }
        let outside = if of.reads { self.read.outside } else { self.write.outside };
        self.events.plan(now + jittered(outside, &mut self.random), thread, Event::Arrive);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Visit = Visit { outside: 100.0, hold_time: 900.0 };
    const WRITE: Visit = Visit { outside: 2500.0, hold_time: 500.0 };

    fn near(a: f64, b: f64, by: f64) {
        assert!((a / b - 1.0).abs() < by, "{a} is not {b}");
    }

    #[test]
    fn single_thread_has_no_contention() {
        // Half of the pages are read in 1000 ns, the other half written in 3000 ns.
        near(speed(READ, WRITE, Mix::ByPages(4), 1e6, 1), 1e9 / 2000.0, 0.02);
        near(speed(READ, WRITE, Mix::ByThread, 1e6, 1), 1e9 / 1000.0, 0.01);
    }

    #[test]
    fn readers_scale_until_cache_line_saturates() {
        // Odd threads would write, but their work outside never ends.
        let idle = Visit { outside: 1e12, hold_time: 0.0 };
        let readers = |count: usize, line| speed(READ, idle, Mix::ByThread, line, 2 * count);
        for count in [1, 2, 16] {
            near(readers(count, 0.0), count as f64 * 1e6, 0.02);
        }
        // Two changes of the word per page, nearly always by another core: 20 million changes per
        // second at 50 ns are 10 million pages.
        near(readers(48, 50.0), 1e7, 0.05);
    }

    #[test]
    fn writer_excludes_all_others() {
        let alone = Visit { outside: 0.0, hold_time: 1000.0 };
        // Without work outside, one thread at a time works as long as there is a reader and a
        // writer.
        let both = speed(alone, alone, Mix::ByPages(1), 0.0, 2);
        assert!(both < 1.7e6 && both > 0.99e6, "{both}");
        // Reader and writer contend: slower than separate threads, faster than one after the other.
        let two = speed(READ, WRITE, Mix::ByThread, 0.0, 2);
        let separate = 1e9 / 1000.0 + 1e9 / 3000.0;
        assert!(two < 0.95 * separate && two > 0.5 * separate, "{two} of {separate}");
    }
}
