//! What the simulations of locks have in common: events of threads in the order of their times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use freestone_benches::data::Random;

/// Visits to the lock that a simulation counts, of all threads, after as many for warming up.
pub const VISITS: u64 = 40_000;
/// Work outside lasts between so much less and so much more than its mean, so that threads do not
/// run in step.
const JITTER: f64 = 0.5;

/// A time as a whole number of picoseconds: events sort by it.
pub type Picos = u64;

pub fn picos(nanos: f64) -> Picos {
    (nanos * 1e3) as Picos
}

/// How long work outside of the lock takes this time.
pub fn around(nanos: f64, random: &mut Random) -> Picos {
    let part = (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
    picos(nanos * (1.0 - JITTER + 2.0 * JITTER * part))
}

/// What is to come.
pub struct Events<E> {
    heap: BinaryHeap<Reverse<(Picos, u64, usize, E)>>,
    /// Of the events so far: makes those of one moment come in the order in which they were
    /// planned.
    planned: u64,
}

impl<E: Ord> Events<E> {
    pub fn new() -> Self {
        Self { heap: BinaryHeap::new(), planned: 0 }
    }

    pub fn plan(&mut self, at: Picos, thread: usize, event: E) {
        self.planned += 1;
        self.heap.push(Reverse((at, self.planned, thread, event)));
    }

    /// The next one: when, and whose.
    pub fn next(&mut self) -> Option<(Picos, usize, E)> {
        self.heap.pop().map(|Reverse((at, _, thread, event))| (at, thread, event))
    }
}
