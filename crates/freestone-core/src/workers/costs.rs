//! What requests cost the thread that does them: whether handing one on is worth it.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::Workers;
use crate::device::{Op, Request};
use crate::sync::{AtomicU32, Ordering};

/// Requests below this are not measured, and never handed on.
pub const MIN_BYTES: u64 = 32 << 10;
/// A request that takes less time is done by the reader: handing it on, and the cold caches of
/// another CPU, cost a good part of this.
const WORTH_NANOS: u64 = 15_000;
/// Work at hand for which a worker is woken: that costs up to a quarter of this, on both sides.
const WORTH_WAKING_NANOS: u64 = 60_000;
/// One of so many requests is measured: the clock is a system call.
const MEASURED_OF: u32 = 4;
/// One measurement moves the average by a part of `1 << WEIGHT_BITS`.
const WEIGHT_BITS: u32 = 2;

/// The average cost of the large requests of one queue. Written by its reader and by workers; a
/// measurement may be lost where two come at once.
#[derive(Debug, Default)]
pub struct Costs {
    read: AtomicU32,
    write: AtomicU32,
    requests: AtomicU32,
}

impl Costs {
    /// Nanoseconds for a KiB.
    fn of(&self, op: Op) -> &AtomicU32 {
        if op == Op::Read { &self.read } else { &self.write }
    }

    /// Whether another thread should do this request. It, and those of its kind that are known to
    /// follow, are `together`; `awake`: no thread has to be woken.
    pub fn are_worth_it(&self, request: &Request, together: u64, awake: bool) -> bool {
        let nanos = self.nanos(request);
        request.len >= MIN_BYTES
            && nanos >= WORTH_NANOS
            && (awake || nanos.saturating_mul(together) >= WORTH_WAKING_NANOS)
    }

    /// Whether one of `workers` should do a request of a queue that has as many like it `behind`, and
    /// others at the device where it `is_busy`. What comes alone has nothing to gain.
    pub fn hand_on(&self, workers: &Workers, request: &Request, behind: u64, is_busy: bool) -> bool {
        (behind > 0 || is_busy)
            && workers.has_room()
            && self.are_worth_it(request, 1 + behind, workers.are_awake())
    }

    /// Whether a worker should be woken for this request alone.
    pub fn are_dear(&self, request: &Request) -> bool {
        self.nanos(request) >= WORTH_WAKING_NANOS
    }

    /// What it will cost.
    fn nanos(&self, request: &Request) -> u64 {
        // Relaxed: a hint.
        u64::from(self.of(request.op).load(Ordering::Relaxed)) * (request.len >> 10)
    }

    /// A request, of at least [`MIN_BYTES`], is about to be done by the calling thread. `None`: this
    /// one is not measured.
    pub fn begin(&self) -> Option<Began> {
        // Relaxed: which ones are measured does not matter.
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        number.is_multiple_of(MEASURED_OF).then(|| Began(cpu_time()))
    }

    /// What began has been done.
    pub fn learn(&self, request: &Request, began: Option<Began>) {
        if let Some(Began(began)) = began {
            self.average(request, cpu_time().saturating_sub(began));
        }
    }

    fn average(&self, request: &Request, spent: Duration) {
        let spent = u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX);
        let sample = u32::try_from(spent / (request.len >> 10).max(1)).unwrap_or(u32::MAX);
        let average = self.of(request.op);
        // Relaxed: a hint.
        let old = average.load(Ordering::Relaxed);
        let new = i64::from(old) + ((i64::from(sample) - i64::from(old)) >> WEIGHT_BITS);
        let new = if old == 0 { sample } else { u32::try_from(new).unwrap_or(u32::MAX) };
        // Relaxed: as above. Zero is one that was not measured.
        average.store(new.max(1), Ordering::Relaxed);
    }
}

/// When a request began, by the CPU time of its thread: waits for a CPU are no work.
#[derive(Debug, Clone, Copy)]
pub struct Began(Duration);

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_long_is_handed_on_until_it_does_not() {
        let costs = Costs::default();
        let large = Request::read(0, 128 << 10);
        let worth = |request: &Request| costs.are_worth_it(request, 1, false);
        assert!(!worth(&large));
        costs.average(&large, Duration::from_micros(100));
        assert!(worth(&large));
        assert!(!worth(&Request::read(0, 16 << 10)), "too small");
        assert!(!worth(&Request::write(0, 128 << 10)), "writes are counted apart");
        // Half of it is not worth waking anybody, but for two of them, or where they are awake.
        let half = Request::read(0, 64 << 10);
        assert!(!worth(&half));
        assert!(costs.are_worth_it(&half, 2, false) && costs.are_worth_it(&half, 1, true));
        for _ in 0..100 {
            costs.average(&large, Duration::from_micros(1));
        }
        assert!(!costs.are_worth_it(&large, 1000, true));
    }
}
