//! What all exports let through, and how that changes while they are there.

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

/// Of all exports, by device and address. Locked for a look or a change.
#[derive(Default)]
pub struct AllLimited(Mutex<ByDevice>);

type ByDevice = HashMap<String, Vec<(String, Arc<Limited>)>>;

impl AllLimited {
    fn lock(&self) -> MutexGuard<'_, ByDevice> {
        // Nothing in here can be half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An export is there.
    pub fn put(&self, name: &str, address: String, limited: Arc<Limited>) {
        self.lock().entry(name.to_owned()).or_default().push((address, limited));
    }

    /// That of one.
    pub fn of(&self, name: &str, address: &str) -> Option<Arc<Limited>> {
        let all = self.lock();
        all.get(name)?.iter().find(|(at, _)| at == address).map(|(_, limited)| Arc::clone(limited))
    }

    /// What an export lets through.
    pub fn limits(&self, name: &str, address: &str) -> LimitSpec {
        self.of(name, address).map(|limited| limited.limits()).unwrap_or_default()
    }

    /// An export is gone.
    pub fn forget(&self, name: &str, address: &str) {
        let mut all = self.lock();
        if let Some(exports) = all.get_mut(name) {
            exports.retain(|(at, _)| at != address);
            if exports.is_empty() {
                all.remove(name);
            }
        }
    }

    /// All exports of a device are gone.
    pub fn forget_all(&self, name: &str) {
        self.lock().remove(name);
    }

    /// The ways on which exports lead into a device.
    pub fn ways(&self, name: &str) -> Vec<Arc<Counting>> {
        let all: Vec<_> =
            self.lock().get(name).into_iter().flatten().map(|(_, one)| Arc::clone(one)).collect();
        all.iter().flat_map(|limited| limited.ways()).collect()
    }
}

impl Exports {
    /// Has no request to a device, or to a template, wait for room or for its turn.
    pub fn no_waiting(&self, entry: &Entry) -> Vec<NoWaiting> {
        self.of_each(entry, Entry::no_waiting)
    }

    /// The same where the content of the device goes: who waits for its turn is answered that it is
    /// gone.
    pub fn end_waiting(&self, entry: &Entry) -> Vec<NoWaiting> {
        self.of_each(entry, Entry::end_waiting)
    }

    fn of_each(&self, entry: &Entry, end: fn(&Entry, &[Arc<Counting>]) -> NoWaiting) -> Vec<NoWaiting> {
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

    /// An export lets through that from now on. What it let through until now.
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

    /// How an export at a place is named.
    pub fn address_of(&self, name: &str, place: &Place) -> Option<String> {
        if let Place::Nbd(at) = place {
            return Some(at.absolute().to_string());
        }
        let all = self.alone_of(name);
        all.iter().find(|export| export.wanted().place.is(place)).map(|export| export.address())
    }
}
