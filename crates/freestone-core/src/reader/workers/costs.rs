//! CPU cost of requests, which decides whether passing a request to a worker pays off.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::Workers;
use crate::device::{Op, Request};
use crate::sync::{AtomicU32, Ordering};

/// Minimum size in bytes of a request that is measured and may be passed to a worker.
pub const MIN_BYTES: u64 = 32 << 10;
/// Minimum cost, in nanoseconds of CPU time, of a request passed to a worker. Passing a request, with the
/// cold caches of another CPU, costs a large part of this time.
const PASS_ON_NANOS_MIN: u64 = 15_000;
/// Minimum cost, in nanoseconds of CPU time, of the work for which a worker is woken. A wake-up costs up to a
/// quarter of this time.
const WAKE_NANOS_MIN: u64 = 60_000;
/// Of `MEASURED_OF` requests only one is measured, because reading the thread's clock is a system call.
const MEASURED_OF: u32 = 4;
/// A new measurement has the weight `1/2^WEIGHT_BITS` in the moving average.
const WEIGHT_BITS: u32 = 2;

/// Average costs of the large requests of a queue, in nanoseconds per KiB. Written by the reader of the queue
/// and by workers; concurrent measurements may be lost.
#[derive(Debug, Default)]
pub struct Costs {
    read: AtomicU32,
    write: AtomicU32,
    requests: AtomicU32,
}

impl Costs {
    fn average(&self, op: Op) -> &AtomicU32 {
        if op == Op::Read { &self.read } else { &self.write }
    }

    /// Returns true if a worker should execute this request. `together` is the number of such requests that
    /// are queued, including this one; `awake` is true if no worker must be woken.
    pub fn is_worker_worthwhile(&self, request: &Request, together: u64, awake: bool) -> bool {
        let nanos = self.expected_nanos(request);
        request.len >= MIN_BYTES
            && nanos >= PASS_ON_NANOS_MIN
            && (awake || nanos.saturating_mul(together) >= WAKE_NANOS_MIN)
    }

    /// Returns true if one of `workers` should execute a request with `behind` similar requests after it in
    /// the queue; `is_busy` is true if the device has other requests. A worker does not make a lone request
    /// faster.
    pub fn should_use_worker(
        &self,
        workers: &Workers,
        request: &Request,
        behind: u64,
        is_busy: bool,
    ) -> bool {
        (behind > 0 || is_busy)
            && workers.has_capacity()
            && self.is_worker_worthwhile(request, 1 + behind, workers.has_awake_worker())
    }

    /// Returns true if waking a worker pays off for this request alone.
    pub fn is_expensive(&self, request: &Request) -> bool {
        self.expected_nanos(request) >= WAKE_NANOS_MIN
    }

    fn expected_nanos(&self, request: &Request) -> u64 {
        // Relaxed: the average is a hint.
        u64::from(self.average(request.op).load(Ordering::Relaxed)) * (request.len >> 10)
    }

    /// Starts to measure the CPU time of a request of at least [`MIN_BYTES`] on the calling thread. Returns
    /// `None` if this request is not sampled.
    pub fn begin(&self) -> Option<CpuStart> {
        // Relaxed: it does not matter which requests are sampled.
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        number.is_multiple_of(MEASURED_OF).then(|| CpuStart(cpu_time()))
    }

    /// Adds the measured CPU time of a completed request to the average. Does nothing if the request is not
    /// sampled.
    pub fn record(&self, request: &Request, began: Option<CpuStart>) {
        if let Some(CpuStart(began)) = began {
            self.add_sample(request, cpu_time().saturating_sub(began));
        }
    }

    fn add_sample(&self, request: &Request, spent: Duration) {
        let spent = u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX);
        let sample = u32::try_from(spent / (request.len >> 10).max(1)).unwrap_or(u32::MAX);
        let average = self.average(request.op);
        // Relaxed: the average is a hint.
        let old = average.load(Ordering::Relaxed);
        let new = i64::from(old) + ((i64::from(sample) - i64::from(old)) >> WEIGHT_BITS);
        let new = if old == 0 { sample } else { u32::try_from(new).unwrap_or(u32::MAX) };
        // Relaxed: the average is a hint. At least 1, because 0 means not measured yet.
        average.store(new.max(1), Ordering::Relaxed);
    }
}

/// CPU time of the calling thread at the start of a measured request. CPU time excludes time spent waiting.
#[derive(Debug, Clone, Copy)]
pub struct CpuStart(Duration);

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expensive_requests_go_to_workers_until_cheap() {
        let costs = Costs::default();
        let large = Request::read(0, 128 << 10);
        let worth = |request: &Request| costs.is_worker_worthwhile(request, 1, false);
        assert!(!worth(&large));
        costs.add_sample(&large, Duration::from_micros(100));
        assert!(worth(&large));
        assert!(!worth(&Request::read(0, 16 << 10)), "too small");
        assert!(!worth(&Request::write(0, 128 << 10)), "writes have their own average");
        // Requests of half the cost are worth a wake-up only if there are two.
        let half = Request::read(0, 64 << 10);
        assert!(!worth(&half));
        assert!(costs.is_worker_worthwhile(&half, 2, false) && costs.is_worker_worthwhile(&half, 1, true));
        for _ in 0..100 {
            costs.add_sample(&large, Duration::from_micros(1));
        }
        assert!(!costs.is_worker_worthwhile(&large, 1000, true));
    }
}
