//! A small discrete-event simulation of a spinning read-write lock: threads, each on a core of its
//! own, that read or write pages under one lock of a whole table. Readers hold it together; nobody
//! queues, so who reads passes a writer that waits, as with the kernel's lock of that time.
//!
//! Time is in nanoseconds. Nothing here is fitted: all numbers come in from outside.

use freestone_benches::data::Random;

use crate::events::{Events, Picos, VISITS, around, picos};

/// One page, in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct Visit {
    /// Outside of the lock.
    pub outside: f64,
    /// Under the lock.
    pub held: f64,
}

/// Who reads and who writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mix {
    /// Every other thread reads, beginning with the first.
    ByThread,
    /// Every thread draws, for so many pages at a time.
    ByPages(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// Wants the lock.
    Arrive,
    Release,
    /// Has seen that somebody let it go.
    Try,
}

struct Thread {
    reads: bool,
    /// Pages of this kind before it draws again.
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
    /// The lock's line is with `last` from then on.
    line_free: Picos,
    last: usize,
    visits: u64,
    random: Random,
}

/// Pages a second of all threads; `line` is a cache line's way between cores.
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
        simulation.think(0, thread);
    }
    let begun = simulation.run_until(VISITS);
    let ended = simulation.run_until(2 * VISITS);
    VISITS as f64 / ((ended - begun) as f64 * 1e-12)
}

impl Simulation {
    fn run_until(&mut self, visits: u64) -> Picos {
        while let Some((now, thread, event)) = self.events.next() {
            match event {
                Event::Arrive => self.want(now, thread),
                // Two may have let it go before it had its turn.
                Event::Try if self.threads[thread].waits => self.want(now, thread),
                Event::Try => {}
                Event::Release => self.release(now, thread),
            }
            if self.visits >= visits {
                return now;
            }
        }
        unreachable!("whoever waits is waited for by nobody who does not run")
    }

    fn want(&mut self, now: Picos, thread: usize) {
        let reads = self.threads[thread].reads;
        let is_free = !self.writer && (reads || self.readers == 0);
        self.threads[thread].waits = !is_free;
        if !is_free {
            return;
        }
        let held = if reads {
            self.readers += 1;
            self.read.held
        } else {
            self.writer = true;
            self.write.held
        };
        let at = self.touch(now, thread) + picos(held);
        self.events.plan(at, thread, Event::Release);
    }

    fn release(&mut self, now: Picos, thread: usize) {
        self.visits += 1;
        if self.threads[thread].reads {
            self.readers -= 1;
        } else {
            self.writer = false;
        }
        let at = self.touch(now, thread);
        for other in 0..self.threads.len() {
            if self.threads[other].waits {
                self.events.plan(at + picos(self.line), other, Event::Try);
            }
        }
        self.think(at, thread);
    }

    /// Changes the word of the lock: it comes over, if another core had it, after whoever else is
    /// changing it. Until when.
    fn touch(&mut self, now: Picos, thread: usize) -> Picos {
        let line = if self.last == thread { 0.0 } else { self.line };
        self.last = thread;
        self.line_free = now.max(self.line_free) + picos(line);
        self.line_free
    }

    /// The part outside of the lock, which comes first.
    fn think(&mut self, now: Picos, thread: usize) {
        let of = &mut self.threads[thread];
        if let Mix::ByPages(pages) = self.mix {
            if of.left == 0 {
                of.reads = self.random.next_u64() >> 63 == 0;
                of.left = pages;
            }
            of.left -= 1;
        }
        let outside = if of.reads { self.read.outside } else { self.write.outside };
        self.events.plan(now + around(outside, &mut self.random), thread, Event::Arrive);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Visit = Visit { outside: 100.0, held: 900.0 };
    const WRITE: Visit = Visit { outside: 2500.0, held: 500.0 };

    fn near(a: f64, b: f64, by: f64) {
        assert!((a / b - 1.0).abs() < by, "{a} is not {b}");
    }

    #[test]
    fn one_thread_takes_its_own_time() {
        // Half of its pages are read in 1000 ns, half are written in 3000.
        near(speed(READ, WRITE, Mix::ByPages(4), 1e6, 1), 1e9 / 2000.0, 0.02);
        near(speed(READ, WRITE, Mix::ByThread, 1e6, 1), 1e9 / 1000.0, 0.01);
    }

    #[test]
    fn readers_hold_it_together_until_its_line_is_full() {
        // Odd threads would write, but they never get to it.
        let idle = Visit { outside: 1e12, held: 0.0 };
        let readers = |count: usize, line| speed(READ, idle, Mix::ByThread, line, 2 * count);
        for count in [1, 2, 16] {
            near(readers(count, 0.0), count as f64 * 1e6, 0.02);
        }
        // Two changes of the word a page, nearly each by another core: 20 million a second at 50 ns
        // are 10 million pages.
        near(readers(48, 50.0), 1e7, 0.05);
    }

    #[test]
    fn a_writer_keeps_everybody_out_and_waits_for_all_readers() {
        let alone = Visit { outside: 0.0, held: 1000.0 };
        // Nothing outside: one at a time, whoever it is, as long as there is one of each.
        let both = speed(alone, alone, Mix::ByPages(1), 0.0, 2);
        assert!(both < 1.7e6 && both > 0.99e6, "{both}");
        // A reader meets the writer: less than both would do apart, more than one after the other.
        let two = speed(READ, WRITE, Mix::ByThread, 0.0, 2);
        let apart = 1e9 / 1000.0 + 1e9 / 3000.0;
        assert!(two < 0.95 * apart && two > 0.5 * apart, "{two} of {apart}");
    }
}
