//! What was asked of a device, by the ways that lead into it, and of the forks of a base.

use std::sync::Arc;

use freestone::device::{Account, Counted, Counting, Tally, Told as _};

use super::Entry;

impl Entry {
    /// What was asked of it, and how that ended.
    pub fn io(&self) -> Option<Counted> {
        self.counting.as_ref().map(|counting| counting.counts())
    }

    /// The same, and how long it took.
    pub fn account(&self) -> Option<Account> {
        self.counting.as_ref().map(|counting| counting.account())
    }

    /// A way into it for an export, which has numbers of its own. A template has none. Its
    /// [place](Tally::set_place) is set when it is known.
    pub fn way(&self) -> Option<Arc<Counting>> {
        self.counting.as_ref().map(|counting| Arc::new(counting.another_way()))
    }

    /// The ways that there are; one of an export has a [place](Tally::place).
    pub fn ways(&self) -> Vec<Arc<Tally>> {
        self.counting.as_ref().map(|counting| counting.ways()).unwrap_or_default()
    }

    /// What was asked of its forks, of those that have gone as well. No number of it gets less, but
    /// for requests in flight.
    pub fn forks_account(&self) -> Account {
        self.forks.told()
    }

    /// A fork's numbers are also in its base's sum.
    pub(super) fn join_base(&self) {
        let base = self.spec.kind.below().filter(|_| self.kind.fork().is_some());
        let base = self.needs.iter().find(|entry| Some(entry.name()) == base);
        if let (Some(base), Some(counting)) = (base, &self.counting) {
            base.forks.take_in(Arc::clone(counting.sum()));
        }
    }
}
