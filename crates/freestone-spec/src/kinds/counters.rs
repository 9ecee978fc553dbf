//! Request counters of a device: in total, per export, and for the forks of a base.

use std::sync::Arc;

use freestone::device::{Counting, IoStats, OpStats, StatSource as _, Tally};

use super::Entry;

impl Entry {
    /// Returns the counters of requests and errors, or `None` for a template.
    pub fn request_counts(&self) -> Option<OpStats> {
        self.counting.as_ref().map(|counting| counting.counts())
    }

    /// Returns the counters and latencies of requests, or `None` for a template.
    pub fn account(&self) -> Option<IoStats> {
        self.counting.as_ref().map(|counting| counting.stats())
    }

    /// Returns a view of the device with separate counters, for an export. Returns `None` for a
    /// template. The caller sets the [address](Tally::set_address) of the counters when the address of
    /// the export is known.
    pub fn new_access_path(&self) -> Option<Arc<Counting>> {
        self.counting.as_ref().map(|counting| Arc::new(counting.new_access_path()))
    }

    /// Returns the separate counters of each view from [`new_access_path`](Self::new_access_path).
    /// The counters of an export have a [address](Tally::address).
    pub fn access_path_tallies(&self) -> Vec<Arc<Tally>> {
        self.counting.as_ref().map(|counting| counting.access_paths()).unwrap_or_default()
    }

    /// Returns the sum of the request counters of the device's forks, including removed ones. The
    /// counters never decrease, except the number of requests in flight.
    pub fn forks_account(&self) -> IoStats {
        self.forks.stats()
    }

    /// Adds the counters of a fork to the sum of its base. Does nothing for other devices.
    pub(super) fn join_base(&self) {
        let base = self.spec.kind.parent_name().filter(|_| self.kind.fork().is_some());
        let base = self.dependencies.iter().find(|entry| Some(entry.name()) == base);
        if let (Some(base), Some(counting)) = (base, &self.counting) {
            base.forks.add(Arc::clone(counting.sum()));
        }
    }
}
