//! Statistics of each access path to a device, and sums that outlive the paths.

use std::time::Duration;

use super::latency::Histogram;
use super::{Counted, Counter, Each, Latency, OpCounts};
use crate::sync::{Arc, AtomicU64, Mutex, OnceLock, Ordering};

/// Statistics: counters and latencies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account {
    /// Counters of operations.
    pub counted: Counted,
    /// Failed requests by kind; their sum is [`Counted::errors`].
    pub failed: Each<u64>,
    /// Latencies of successful requests, estimated as described at [`Counting`](super::Counting).
    pub latency: Each<Latency>,
}

impl Account {
    /// Adds other statistics.
    pub fn add(&mut self, other: &Self) {
        self.counted.add(&other.counted);
        for counter in Counter::ALL {
            self.failed[counter] += other.failed[counter];
            self.latency[counter].add(&other.latency[counter]);
        }
    }

    /// Returns the latencies of requests of all kinds.
    pub fn latency_of_all(&self) -> Latency {
        let mut all = Latency::default();
        for counter in Counter::ALL {
            all.add(&self.latency[counter]);
        }
        all
    }
}

/// A source of statistics.
pub trait Told {
    /// Returns the statistics so far. Work in flight may be missing.
    fn told(&self) -> Account;
    /// Returns the counters, without latencies.
    fn counted(&self) -> Counted;
}

/// Statistics of one access path to a device. Uses almost no memory until the first request.
#[derive(Default)]
pub struct Tally {
    device: String,
    counts: OnceLock<OpCounts>,
    failed: Each<AtomicU64>,
    latency: Each<OnceLock<Box<Histogram>>>,
    place: OnceLock<String>,
}

impl Tally {
    /// Creates zero statistics for a device of this name.
    pub fn new(device: &str) -> Self {
        Self { device: device.to_owned(), ..Self::default() }
    }

    /// Returns the name of the device.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Returns the counters.
    #[inline]
    pub fn counts(&self) -> &OpCounts {
        self.counts.get_or_init(OpCounts::default)
    }

    /// Counts a failed request by kind, in addition to [`counts`](Self::counts).
    #[cold]
    pub fn failed(&self, counter: Counter) {
        // Relaxed: a statistic.
        self.failed[counter].fetch_add(1, Ordering::Relaxed);
    }

    /// Adds the latency of a successful request, with the weight `stands_for`.
    pub fn took(&self, counter: Counter, took: Duration, stands_for: u64) {
        self.latency[counter].get_or_init(Box::default).add(took, stands_for);
    }

    /// Sets the address of this access path.
    pub fn set_place(&self, place: &str) {
        // A second call would set the same address.
        let _ = self.place.set(place.to_owned());
    }

    /// Returns the address of this access path; `None` inside the process.
    pub fn place(&self) -> Option<&str> {
        self.place.get().map(String::as_str)
    }
}

impl Told for Tally {
    fn told(&self) -> Account {
        let mut account = Account { counted: self.counted(), ..Account::default() };
        for counter in Counter::ALL {
            // Relaxed: a statistic.
            account.failed[counter] = self.failed[counter].load(Ordering::Relaxed);
            if let Some(histogram) = self.latency[counter].get() {
                account.latency[counter] = histogram.read();
            }
        }
        account
    }

    fn counted(&self) -> Counted {
        self.counts.get().map(OpCounts::snapshot).unwrap_or_default()
    }
}

/// Sum of the statistics of members that come and go. The statistics of a dropped member remain in the sum,
/// so only the number of requests in flight ever decreases.
///
/// A member is dropped when the sum has the last reference. Under the lock only statistics are read, which
/// takes the locks of member sums.
pub struct Sum<T>(Mutex<Members<T>>);

struct Members<T> {
    present: Vec<Arc<T>>,
    /// Statistics of dropped members.
    dropped: Account,
    /// Number of members at which dropped ones are removed.
    fold_at: usize,
}

/// With fewer members a scan is not worthwhile.
const FOLD_AT_MIN: usize = 16;

impl<T> Default for Sum<T> {
    fn default() -> Self {
        Self(Mutex::new(Members { present: Vec::new(), dropped: Account::default(), fold_at: FOLD_AT_MIN }))
    }
}

impl<T: Told> Sum<T> {
    /// Adds a member.
    pub fn take_in(&self, member: Arc<T>) {
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

    /// Returns the present members, and the statistics of dropped ones.
    fn collect(&self) -> (Vec<Arc<T>>, Account) {
        let mut members = self.0.lock();
        members.fold_dropped();
        (members.present.clone(), members.dropped.clone())
    }
}

impl<T: Told> Members<T> {
    fn fold_dropped(&mut self) {
        let dropped = &mut self.dropped;
        self.present.retain_mut(|member| match Arc::get_mut(member) {
            Some(member) => {
                dropped.add(&member.told());
                false
            }
            None => true,
        });
    }
}

impl<T: Told> Told for Sum<T> {
    fn told(&self) -> Account {
        let (present, mut sum) = self.collect();
        for member in present {
            sum.add(&member.told());
        }
        sum
    }

    fn counted(&self) -> Counted {
        let (present, Account { counted: mut sum, .. }) = self.collect();
        for member in present {
            sum.add(&member.counted());
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Error, Op, Request, Tried};

    fn tally(reads: u64) -> Arc<Tally> {
        let tally = Arc::new(Tally::default());
        for _ in 0..reads {
            tally.counts().tried(&Request::read(0, 512), &Ok(Tried::Done));
            tally.took(Counter::Read, Duration::from_micros(1), 1);
        }
        tally
    }

    #[test]
    fn sum_keeps_statistics_of_dropped_members() {
        let sum = Sum::default();
        let all: Vec<_> = (1..=100).map(tally).collect();
        for tally in &all {
            sum.take_in(Arc::clone(tally));
        }
        let before = sum.told();
        assert_eq!((before.counted.reads, before.counted.read_bytes), (5050, 5050 * 512));
        assert_eq!(before.latency[Counter::Read].requests(), 5050);
        let kept = Arc::clone(&all[99]);
        drop(all);
        assert_eq!(sum.told(), before);
        assert_eq!(sum.members().len(), 1);
        kept.counts().tried(&Request::write(0, 512), &Ok(Tried::Done));
        assert_eq!((sum.counted().writes, sum.counted().reads), (1, 5050));
    }

    #[test]
    fn dropped_members_do_not_accumulate() {
        let sum = Sum::default();
        for _ in 0..10_000 {
            sum.take_in(tally(1));
        }
        assert!(sum.0.lock().present.len() <= 2 * FOLD_AT_MIN, "dropped members are removed");
        assert_eq!(sum.counted().reads, 10_000);
    }

    #[test]
    fn sum_of_sums_keeps_statistics() {
        let family = Sum::default();
        let device = Arc::new(Sum::default());
        device.take_in(tally(3));
        family.take_in(Arc::clone(&device));
        let way = tally(4);
        device.take_in(Arc::clone(&way));
        way.failed(Counter::Flush);
        assert_eq!((family.told().counted.reads, family.told().failed[Counter::Flush]), (7, 1));
        drop((device, way));
        assert_eq!((family.told().counted.reads, family.members().len()), (7, 0));
    }

    #[test]
    fn failure_is_counted_by_operation() {
        let tally = Tally::default();
        assert_eq!(tally.told(), Account::default());
        tally.counts().answered(&Request::flush(), &Err(Error::Media));
        tally.failed(Op::Flush.into());
        let told = tally.told();
        assert_eq!((told.counted.errors, told.failed[Counter::Flush], told.failed[Counter::Read]), (1, 1, 0));
        tally.set_place("unix:/a");
        assert_eq!(tally.place(), Some("unix:/a"));
    }
}
