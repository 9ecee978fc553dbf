//! Event queue of the lock simulations, in the order of simulated time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use freestone_benches::data::Random;

/// Number of counted visits to the lock, of all threads together. As many visits before the counted
/// ones are the warm-up.
pub const VISITS: u64 = 40_000;
/// Relative jitter of the work outside the lock, so that threads do not run in lockstep.
const JITTER: f64 = 0.5;

/// Time in whole picoseconds, so that events can be ordered.
pub type Picos = u64;

pub fn picos(nanos: f64) -> Picos {
    (nanos * 1e3) as Picos
}

/// Returns the duration of the work outside the lock, with jitter.
pub fn jittered(nanos: f64, random: &mut Random) -> Picos {
    let part = (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
    picos(nanos * (1.0 - JITTER + 2.0 * JITTER * part))
}

pub struct Events<E> {
    heap: BinaryHeap<Reverse<(Picos, u64, usize, E)>>,
    /// Number of events added so far, which orders events at the same time.
    added: u64,
}

impl<E: Ord> Events<E> {
    pub fn new() -> Self {
        Self { heap: BinaryHeap::new(), added: 0 }
    }

    pub fn plan(&mut self, at: Picos, thread: usize, event: E) {
        self.added += 1;
        self.heap.push(Reverse((at, self.added, thread, event)));
    }

    /// Removes the next event and returns its time, its thread and the event. Returns None if no
    /// event is pending.
    pub fn next(&mut self) -> Option<(Picos, usize, E)> {
        self.heap.pop().map(|Reverse((at, _, thread, event))| (at, thread, event))
    }
}
