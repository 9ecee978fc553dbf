//! Request counters of a device: in total, for each export, and for the forks of a base.

use std::sync::Arc;

use freestone::device::{Account, Counted, Counting, Tally, Told as _};

use super::Entry;

impl Entry {
    /// Returns the counters of requests and errors.
    pub fn io(&self) -> Option<Counted> {
        self.counting.as_ref().map(|counting| counting.counts())
    }

    /// Returns the counters and latencies of requests.
    pub fn account(&self) -> Option<Account> {
        self.counting.as_ref().map(|counting| counting.account())
    }

    /// Returns a device with counters of its own, for an export. A template has none. The caller sets
    /// its [place](Tally::set_place) when the address of the export is known.
    pub fn way(&self) -> Option<Arc<Counting>> {
        self.counting.as_ref().map(|counting| Arc::new(counting.another_way()))
    }

    /// Returns the counters of each such device. Those of an export have a [place](Tally::place).
    pub fn ways(&self) -> Vec<Arc<Tally>> {
        self.counting.as_ref().map(|counting| counting.ways()).unwrap_or_default()
    }

    /// Returns the counters of the device's forks, including removed ones. The counters never decrease,
    /// except the number of requests in flight.
    pub fn forks_account(&self) -> Account {
        self.forks.told()
    }

    /// Adds the counters of a fork to the sum of its base.
    pub(super) fn join_base(&self) {
        let base = self.spec.kind.below().filter(|_| self.kind.fork().is_some());
        let base = self.needs.iter().find(|entry| Some(entry.name()) == base);
        if let (Some(base), Some(counting)) = (base, &self.counting) {
            base.forks.take_in(Arc::clone(counting.sum()));
        }
    }
}
