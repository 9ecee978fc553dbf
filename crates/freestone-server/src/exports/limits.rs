//! Limits of all exports: registration, lookup, and changes while exports are in use.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use freestone::device::Counting;
use freestone_control::protocol::RpcError;
use freestone_spec::kinds::{Entry, WaitBypass};
use freestone_spec::limits::LimitSpec;
use freestone_spec::refusal::Errno;

use super::Exports;
use crate::devices::claims::Claim;
use crate::exports::export_limits::ExportLimits;
use crate::exports::export_spec::{ExportAddress, ExportSpec};

/// Limits of all exports, by device and address. The mutex is held only while the map is read or changed.
#[derive(Default)]
pub struct AllExportLimits(Mutex<ByDevice>);

type ByDevice = HashMap<String, Vec<(String, Arc<ExportLimits>)>>;

impl AllExportLimits {
    fn lock(&self) -> MutexGuard<'_, ByDevice> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the limits of a new export of the device `name`.
    pub fn put(&self, name: &str, address: String, limited: Arc<ExportLimits>) {
        self.lock().entry(name.to_owned()).or_default().push((address, limited));
    }

    /// Returns the limits of an export as a shared object that can be changed, or `None` if the export is unknown.
    pub fn of(&self, name: &str, address: &str) -> Option<Arc<ExportLimits>> {
        let all = self.lock();
        all.get(name)?.iter().find(|(at, _)| at == address).map(|(_, limited)| Arc::clone(limited))
    }

    /// Returns the values of an export's limits, which are unlimited if the export is unknown.
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
    pub fn access_paths(&self, name: &str) -> Vec<Arc<Counting>> {
        let all: Vec<_> =
            self.lock().get(name).into_iter().flatten().map(|(_, one)| Arc::clone(one)).collect();
        all.iter().flat_map(|limited| limited.access_paths()).collect()
    }
}

impl Exports {
    /// Makes requests to a device, or to all forks of a template, no longer wait for memory or limits, until the
    /// returned guards are dropped.
    pub fn bypass_waiting(&self, entry: &Entry) -> Vec<WaitBypass> {
        self.for_each_device(entry, Entry::bypass_waiting)
    }

    /// Like [`bypass_waiting`](Self::bypass_waiting), for a device whose content is about to be removed: requests that
    /// wait for a limit fail with the error `Gone`.
    pub fn fail_waiting(&self, entry: &Entry) -> Vec<WaitBypass> {
        self.for_each_device(entry, Entry::fail_waiting)
    }

    fn for_each_device(
        &self,
        entry: &Entry,
        end: fn(&Entry, &[Arc<Counting>]) -> WaitBypass,
    ) -> Vec<WaitBypass> {
        let access_paths = self.limited.access_paths(entry.name());
        if entry.device().is_some() {
            return vec![end(entry, &access_paths)];
        }
        let of_template = |fork: &&Arc<Entry>| fork.template.as_deref() == Some(entry.name());
        let forks = self.registry.all();
        forks
            .iter()
            .filter(of_template)
            .map(|fork| {
                let own: Vec<_> =
                    access_paths.iter().filter(|path| fork.is_access_path(path)).cloned().collect();
                end(fork, &own)
            })
            .collect()
    }

    /// Sets the limits of the export at the address of `wanted`. Returns the previous limits.
    pub fn limit_at(
        &self,
        _: &Claim<'_>,
        entry: &Entry,
        wanted: &ExportSpec,
        limits: LimitSpec,
    ) -> Result<LimitSpec, RpcError> {
        let name = entry.name();
        let failed = |errno, why: String| RpcError::failed(errno, format!("{name}: {why}"));
        wanted
            .address
            .check_limits(&limits)
            .map_err(|why| RpcError::invalid(format!("{name}: publish: {why}")))?;
        let address = self.address_of(name, &wanted.address);
        let Some(limited) = address.and_then(|address| self.limited.of(name, &address)) else {
            return Err(failed(Errno::ENODEV, format!("is not published at {}", wanted.address)));
        };
        let before = limited.limits();
        let set = limited.set(limits);
        set.map_err(|e| {
            failed(Errno::ENOMEM, format!("limits need a thread, which cannot be started: {e}"))
        })?;
        Ok(before)
    }

    /// Returns the address of a device's export as text. Returns `None` if `place` is local and the device is not
    /// published there.
    pub fn address_of(&self, name: &str, place: &ExportAddress) -> Option<String> {
        if let ExportAddress::Nbd(at) = place {
            return Some(at.absolute().to_string());
        }
        let local = self.local_of(name);
        local.iter().find(|export| export.spec().address.is_same(place)).map(|export| export.address())
    }
}
