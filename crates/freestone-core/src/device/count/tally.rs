//! Statistics of each access path to a device, and sums that outlive the paths.

use std::time::Duration;

use super::latency::Histogram;
use super::{Counter, Latency, OpCounts, OpStats, PerCounter};
use crate::sync::{Arc, AtomicU64, Mutex, OnceLock, Ordering};

/// I/O statistics: counters and latencies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IoStats {
    /// Counters of operations and bytes.
    pub ops: OpStats,
    /// Number of failed requests of each kind; the sum is [`OpStats::errors`].
    pub failed: PerCounter<u64>,
    /// Latencies of successful requests of each kind, estimated as described at
    /// [`Counting`](super::Counting).
    pub latency: PerCounter<Latency>,
}

impl IoStats {
    /// Adds the statistics of `other`.
    pub fn add(&mut self, other: &Self) {
        self.ops.add(&other.ops);
        for counter in Counter::ALL {
            self.failed[counter] += other.failed[counter];
            self.latency[counter].add(&other.latency[counter]);
        }
    }

    /// Returns the latencies of all kinds of requests together.
    pub fn latency_of_all(&self) -> Latency {
        let mut all = Latency::default();
        for counter in Counter::ALL {
            all.add(&self.latency[counter]);
        }
        all
    }
}

/// A source of I/O statistics: an access path, or a sum of access paths or devices.
pub trait StatSource {
    /// Returns the present statistics. Requests in flight may be missing.
    fn stats(&self) -> IoStats;
    /// Returns the operation counters, without latencies.
    fn op_stats(&self) -> OpStats;
}

/// Statistics of one access path to a device. Uses almost no memory until the first request.
#[derive(Default)]
pub struct Tally {
    device: String,
    counts: OnceLock<OpCounts>,
    failed: PerCounter<AtomicU64>,
    latency: PerCounter<OnceLock<Box<Histogram>>>,
    address: OnceLock<String>,
}

impl Tally {
    /// Creates zero statistics for an access path to the device of this name.
    pub fn new(device: &str) -> Self {
        Self { device: device.to_owned(), ..Self::default() }
    }

    /// Returns the name of the device.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Returns the operation counters.
    #[inline]
    pub fn counts(&self) -> &OpCounts {
        self.counts.get_or_init(OpCounts::default)
    }

    /// Counts a failed request by kind, in addition to [`counts`](Self::counts).
    #[cold]
    pub fn count_failure(&self, counter: Counter) {
        // Relaxed: a statistic.
        self.failed[counter].fetch_add(1, Ordering::Relaxed);
    }

    /// Adds the latency of a successful request, which counts `weight` times.
    pub fn add_latency(&self, counter: Counter, took: Duration, weight: u64) {
        self.latency[counter].get_or_init(Box::default).add(took, weight);
    }

    /// Sets the address at which clients use this access path.
    pub fn set_address(&self, address: &str) {
        // A second call would set the same address.
        let _ = self.address.set(address.to_owned());
    }

    /// Returns the address of this access path, or `None` if the path is used inside the process.
    pub fn address(&self) -> Option<&str> {
        self.address.get().map(String::as_str)
    }
}

impl StatSource for Tally {
    fn stats(&self) -> IoStats {
        let mut stats = IoStats { ops: self.op_stats(), ..IoStats::default() };
        for counter in Counter::ALL {
            // Relaxed: a statistic.
            stats.failed[counter] = self.failed[counter].load(Ordering::Relaxed);
            if let Some(histogram) = self.latency[counter].get() {
                stats.latency[counter] = histogram.read();
            }
        }
        stats
    }

    fn op_stats(&self) -> OpStats {
        self.counts.get().map(OpCounts::snapshot).unwrap_or_default()
    }
}

/// Sum of the statistics of members that are added and dropped over time. The statistics of a dropped member
/// remain in the sum, so only the number of requests in flight ever decreases.
///
/// A member is dropped when the sum has the last reference. Lock order: under this lock only statistics are
/// read, which takes the locks of members that are sums.
pub struct Sum<T>(Mutex<Members<T>>);

struct Members<T> {
    present: Vec<Arc<T>>,
    /// Statistics of dropped members.
    dropped: IoStats,
    /// Number of members at which dropped members are removed.
    fold_at: usize,
}

/// Minimum of `fold_at`. With fewer members a scan for dropped members is not worthwhile.
const FOLD_AT_MIN: usize = 16;

impl<T> Default for Sum<T> {
    fn default() -> Self {
        Self(Mutex::new(Members { present: Vec::new(), dropped: IoStats::default(), fold_at: FOLD_AT_MIN }))
    }
}

impl<T: StatSource> Sum<T> {
    /// Adds a member, whose statistics the sum then includes.
    pub fn add(&self, member: Arc<T>) {
        let mut members = self.0.lock();
        members.present.push(member);
        if members.present.len() >= members.fold_at {
            members.fold_dropped();
            members.fold_at = (2 * members.present.len()).max(FOLD_AT_MIN);
        }
    }

    /// Returns the present members.
    pub fn members(&self) -> Vec<Arc<T>> {
        self.collect().0
    }

    /// Returns the present members, and the statistics of dropped members.
    fn collect(&self) -> (Vec<Arc<T>>, IoStats) {
        let mut members = self.0.lock();
        members.fold_dropped();
        (members.present.clone(), members.dropped.clone())
    }
}

impl<T: StatSource> Members<T> {
    fn fold_dropped(&mut self) {
        let dropped = &mut self.dropped;
        self.present.retain_mut(|member| match Arc::get_mut(member) {
            Some(member) => {
                dropped.add(&member.stats());
                false
            }
            None => true,
        });
    }
}

impl<T: StatSource> StatSource for Sum<T> {
    fn stats(&self) -> IoStats {
        let (present, mut sum) = self.collect();
        for member in present {
            sum.add(&member.stats());
        }
        sum
    }

    fn op_stats(&self) -> OpStats {
        let (present, IoStats { ops: mut sum, .. }) = self.collect();
        for member in present {
            sum.add(&member.op_stats());
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Error, Op, Request, TryResult};

    fn tally(reads: u64) -> Arc<Tally> {
        let tally = Arc::new(Tally::default());
        for _ in 0..reads {
            tally.counts().count_try(&Request::read(0, 512), &Ok(TryResult::Done));
            tally.add_latency(Counter::Read, Duration::from_micros(1), 1);
        }
        tally
    }

    #[test]
    fn sum_keeps_statistics_of_dropped_members() {
        let sum = Sum::default();
        let all: Vec<_> = (1..=100).map(tally).collect();
        for tally in &all {
            sum.add(Arc::clone(tally));
        }
        let before = sum.stats();
        assert_eq!((before.ops.reads, before.ops.read_bytes), (5050, 5050 * 512));
        assert_eq!(before.latency[Counter::Read].requests(), 5050);
        let kept = Arc::clone(&all[99]);
        drop(all);
        assert_eq!(sum.stats(), before);
        assert_eq!(sum.members().len(), 1);
        kept.counts().count_try(&Request::write(0, 512), &Ok(TryResult::Done));
        assert_eq!((sum.op_stats().writes, sum.op_stats().reads), (1, 5050));
    }

    #[test]
    fn dropped_members_do_not_accumulate() {
        let sum = Sum::default();
        for _ in 0..10_000 {
            sum.add(tally(1));
        }
        assert!(sum.0.lock().present.len() <= 2 * FOLD_AT_MIN, "dropped members are removed");
        assert_eq!(sum.op_stats().reads, 10_000);
    }

    #[test]
    fn sum_of_sums_keeps_statistics() {
        let family = Sum::default();
        let device = Arc::new(Sum::default());
        device.add(tally(3));
        family.add(Arc::clone(&device));
        let way = tally(4);
        device.add(Arc::clone(&way));
        way.count_failure(Counter::Flush);
        assert_eq!((family.stats().ops.reads, family.stats().failed[Counter::Flush]), (7, 1));
        drop((device, way));
        assert_eq!((family.stats().ops.reads, family.members().len()), (7, 0));
    }

    #[test]
    fn failure_is_counted_by_operation() {
        let tally = Tally::default();
        assert_eq!(tally.stats(), IoStats::default());
        tally.counts().count_completion(&Request::flush(), &Err(Error::Media));
        tally.count_failure(Op::Flush.into());
        let stats = tally.stats();
        assert_eq!((stats.ops.errors, stats.failed[Counter::Flush], stats.failed[Counter::Read]), (1, 1, 0));
        tally.set_address("unix:/a");
        assert_eq!(tally.address(), Some("unix:/a"));
    }
}
