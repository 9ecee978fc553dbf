//! What came through one way into a device, and sums of that which stay when the ways go.

use std::time::Duration;

use super::latency::Histogram;
use super::{Counted, Counter, Each, Latency, OpCounts};
use crate::sync::{Arc, AtomicU64, Mutex, OnceLock, Ordering};

/// What was asked, and how long it took.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account {
    /// What was asked and what was answered.
    pub counted: Counted,
    /// Requests that failed: all of [`Counted::errors`].
    pub failed: Each<u64>,
    /// How long those took that succeeded: an estimate, see [`Counting`](super::Counting).
    pub latency: Each<Latency>,
}

impl Account {
    /// Adds another one.
    pub fn add(&mut self, other: &Self) {
        self.counted.add(&other.counted);
        for counter in Counter::ALL {
            self.failed[counter] += other.failed[counter];
            self.latency[counter].add(&other.latency[counter]);
        }
    }

    /// How long all requests took, whatever they were.
    pub fn latency_of_all(&self) -> Latency {
        let mut all = Latency::default();
        for counter in Counter::ALL {
            all.add(&self.latency[counter]);
        }
        all
    }
}

/// Something that tells what was asked of it.
pub trait Told {
    /// What it has counted so far; what is under way may be missing.
    fn told(&self) -> Account;
    /// The same without the latencies.
    fn counted(&self) -> Counted;
}

/// Counters of one way into a device. One that nobody goes takes next to no memory.
#[derive(Default)]
pub struct Tally {
    device: String,
    counts: OnceLock<OpCounts>,
    failed: Each<AtomicU64>,
    latency: Each<OnceLock<Box<Histogram>>>,
    place: OnceLock<String>,
}

impl Tally {
    /// One of a device of this name. All numbers are 0.
    pub fn new(device: &str) -> Self {
        Self { device: device.to_owned(), ..Self::default() }
    }

    /// The device's name.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// The counters.
    #[inline]
    pub fn counts(&self) -> &OpCounts {
        self.counts.get_or_init(OpCounts::default)
    }

    /// Counts what failed, beside the counters.
    #[cold]
    pub fn failed(&self, counter: Counter) {
        // Relaxed: a statistic.
        self.failed[counter].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts how long a request took that was answered well, for as many as it stands for.
    pub fn took(&self, counter: Counter, took: Duration, stands_for: u64) {
        self.latency[counter].get_or_init(Box::default).add(took, stands_for);
    }

    /// Where this way begins, once that is known.
    pub fn set_place(&self, place: &str) {
        // A second one would be the same.
        let _ = self.place.set(place.to_owned());
    }

    /// Where this way begins; `None` within the process.
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

/// The sum of things that come and go. What one has counted stays in the sum when it goes, so no
/// number but that of requests in flight ever gets less.
///
/// One has gone when nobody but the sum has it any more. Nothing is called under the lock but what
/// reads numbers, and locks of sums below.
pub struct Sum<T>(Mutex<Members<T>>);

struct Members<T> {
    there: Vec<Arc<T>>,
    /// Of those that have gone.
    gone: Account,
    /// When so many are there, it is looked who has gone.
    look_at: usize,
}

/// Fewer members are not worth a look.
const LOOK_AT_LEAST: usize = 16;

impl<T> Default for Sum<T> {
    fn default() -> Self {
        Self(Mutex::new(Members { there: Vec::new(), gone: Account::default(), look_at: LOOK_AT_LEAST }))
    }
}

impl<T: Told> Sum<T> {
    /// Takes one in.
    pub fn take_in(&self, member: Arc<T>) {
        let mut members = self.0.lock();
        members.there.push(member);
        if members.there.len() >= members.look_at {
            members.fold();
            members.look_at = (2 * members.there.len()).max(LOOK_AT_LEAST);
        }
    }

    /// Those that are there.
    pub fn members(&self) -> Vec<Arc<T>> {
        self.look().0
    }

    /// Those that are there, and what those have counted that are not.
    fn look(&self) -> (Vec<Arc<T>>, Account) {
        let mut members = self.0.lock();
        members.fold();
        (members.there.clone(), members.gone.clone())
    }
}

impl<T: Told> Members<T> {
    fn fold(&mut self) {
        let gone = &mut self.gone;
        self.there.retain_mut(|member| match Arc::get_mut(member) {
            Some(member) => {
                gone.add(&member.told());
                false
            }
            None => true,
        });
    }
}

impl<T: Told> Told for Sum<T> {
    fn told(&self) -> Account {
        let (there, mut sum) = self.look();
        for member in there {
            sum.add(&member.told());
        }
        sum
    }

    fn counted(&self) -> Counted {
        let (there, Account { counted: mut sum, .. }) = self.look();
        for member in there {
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
    fn what_has_gone_stays_in_the_sum() {
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
    fn those_that_come_and_go_do_not_pile_up() {
        let sum = Sum::default();
        for _ in 0..10_000 {
            sum.take_in(tally(1));
        }
        assert!(sum.0.lock().there.len() <= 2 * LOOK_AT_LEAST, "who has gone is forgotten");
        assert_eq!(sum.counted().reads, 10_000);
    }

    #[test]
    fn sums_have_sums() {
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
    fn a_request_is_known_by_its_operation() {
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
