//! Limits of all exports: registration, lookup, and changes while exports are in use.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use freestone::device::Counting;
use freestone_spec::kinds::{Entry, NoWaiting};
use freestone_spec::limits::LimitSpec;
use freestone_spec::refusal::Errno;

use super::Exports;
use crate::claims::Claim;
use crate::control::protocol::Fault;
use crate::limited::Limited;
use crate::places::{Place, Wanted};

/// Limits of all exports, by device and address. The mutex is held only while the map is read or changed.
#[derive(Default)]
pub struct AllLimited(Mutex<ByDevice>);

type ByDevice = HashMap<String, Vec<(String, Arc<Limited>)>>;

impl AllLimited {
    fn lock(&self) -> MutexGuard<'_, ByDevice> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the limits of a new export.
    pub fn put(&self, name: &str, address: String, limited: Arc<Limited>) {
        self.lock().entry(name.to_owned()).or_default().push((address, limited));
    }

    /// Returns the limiter of an export.
    pub fn of(&self, name: &str, address: &str) -> Option<Arc<Limited>> {
        let all = self.lock();
        all.get(name)?.iter().find(|(at, _)| at == address).map(|(_, limited)| Arc::clone(limited))
    }

    /// Returns the limits of an export; no limits if it is unknown.
    pub fn limits(&self, name: &str, address: &str) -> LimitSpec {
        self.of(name, address).map(|limited| limited.limits()).unwrap_or_default()
    }

    /// Removes the limits of an export.
    pub fn forget(&self, name: &str, address: &str) {
        let mut all = self.lock();
        if let Some(exports) = all.get_mut(name) {
            exports.retain(|(at, _)| at != address);
            if exports.is_empty() {
                all.remove(name);
            }
        }
    }

    /// Removes the limits of all exports of a device.
    pub fn forget_all(&self, name: &str) {
        self.lock().remove(name);
    }

    /// Returns the access paths of all exports of a device.
    pub fn ways(&self, name: &str) -> Vec<Arc<Counting>> {
        let all: Vec<_> =
            self.lock().get(name).into_iter().flatten().map(|(_, one)| Arc::clone(one)).collect();
        all.iter().flat_map(|limited| limited.ways()).collect()
    }
}

impl Exports {
    /// Lets requests to a device, or to all forks of a template, no longer wait for memory or limits, until the
    /// returned guards are dropped.
    pub fn no_waiting(&self, entry: &Entry) -> Vec<NoWaiting> {
        self.for_each_device(entry, Entry::no_waiting)
    }

    /// Like [`no_waiting`](Self::no_waiting), for a device whose content is about to be removed: requests that
    /// wait for a limit fail with "gone".
    pub fn end_waiting(&self, entry: &Entry) -> Vec<NoWaiting> {
        self.for_each_device(entry, Entry::end_waiting)
    }

    fn for_each_device(
        &self,
        entry: &Entry,
        end: fn(&Entry, &[Arc<Counting>]) -> NoWaiting,
    ) -> Vec<NoWaiting> {
        let ways = self.limited.ways(entry.name());
        if entry.device().is_some() {
            return vec![end(entry, &ways)];
        }
        let of_template = |fork: &&Arc<Entry>| fork.template.as_deref() == Some(entry.name());
        let forks = self.registry.all();
        forks
            .iter()
            .filter(of_template)
            .map(|fork| {
                let own: Vec<_> = ways.iter().filter(|way| fork.is_way(way)).cloned().collect();
                end(fork, &own)
            })
            .collect()
    }

    /// Sets the limits of an export. Returns the previous limits.
    pub fn limit_at(
        &self,
        _: &Claim<'_>,
        entry: &Entry,
        wanted: &Wanted,
        limits: LimitSpec,
    ) -> Result<LimitSpec, Fault> {
        let name = entry.name();
        let failed = |errno, why: String| Fault::failed(errno, format!("{name}: {why}"));
        wanted
            .place
            .check_limits(&limits)
            .map_err(|why| Fault::invalid(format!("{name}: publish: {why}")))?;
        let address = self.address_of(name, &wanted.place);
        let Some(limited) = address.and_then(|address| self.limited.of(name, &address)) else {
            return Err(failed(Errno::ENODEV, format!("is not published at {}", wanted.place)));
        };
        let before = limited.limits();
        let set = limited.set(limits);
        set.map_err(|e| {
            failed(Errno::ENOMEM, format!("limits need a thread, which cannot be started: {e}"))
        })?;
        Ok(before)
    }

    /// Returns the address of a device's export at a place, as text.
    pub fn address_of(&self, name: &str, place: &Place) -> Option<String> {
        if let Place::Nbd(at) = place {
            return Some(at.absolute().to_string());
        }
        let local = self.local_of(name);
        local.iter().find(|export| export.wanted().place.is(place)).map(|export| export.address())
    }
}
