//! Absent exports: exports in the state directory that cannot be published yet. For example, a directory does not exist
//! yet, or an address is not up or is in use. Absent exports remain in the state, and
//! [`export_retry`](crate::changes::export_retry) retries them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use freestone_state::Export;

use crate::exports::export_spec::{ExportAddress, ExportSet, ExportSpec};

/// Absent exports of all devices.
#[derive(Default)]
pub struct UnpublishedExports {
    /// Absent exports, by device name. The lock is held only while the map is read or changed.
    all: Mutex<HashMap<String, Vec<UnpublishedExport>>>,
    /// Exports whose records cannot be parsed, by device name. The lock is held only while the map is read or changed.
    unparsed: Mutex<HashMap<String, Vec<UnparsedExport>>>,
    /// True while a thread retries the absent exports.
    is_retried: AtomicBool,
}

/// An export in the state whose record cannot be parsed, for example because a newer version wrote it. Such an export
/// is not retried, and its record stays unchanged until the device is unpublished.
#[derive(Debug, Clone)]
pub struct UnparsedExport {
    /// The unchanged state record.
    pub record: Export,
    /// Reason why the record cannot be parsed.
    pub why: String,
}

impl UnparsedExport {
    /// Returns the address of the export as text.
    pub fn address(&self) -> String {
        let Export { nbd, vhost_user, .. } = &self.record;
        nbd.as_ref().or(vhost_user.as_ref()).cloned().unwrap_or_else(|| "a block device".into())
    }
}

/// An export that cannot be published yet.
#[derive(Debug, Clone)]
pub struct UnpublishedExport {
    /// The export. The boolean is true if a configuration file declares it. `None` means the server's own addresses.
    pub export: Option<(ExportSpec, bool)>,
    /// Reason why the export is not published.
    pub why: String,
}

impl UnpublishedExport {
    /// Returns the address of the export as text.
    pub fn address(&self) -> String {
        self.export.as_ref().map_or("the server's addresses".into(), |(wanted, _)| wanted.address.to_string())
    }

    fn is_at(&self, place: &ExportAddress) -> bool {
        self.export.as_ref().is_some_and(|(wanted, _)| wanted.address.is_same(place))
    }
}

impl UnpublishedExports {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<UnpublishedExport>>> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if there are exports to retry and no thread retries them. The caller then starts a thread.
    pub fn begin_retries(&self) -> bool {
        !self.names().is_empty() && !self.is_retried.swap(true, Ordering::SeqCst)
    }

    /// Records that the thread that retries exports has ended.
    pub fn end_retries(&self) {
        self.is_retried.store(false, Ordering::SeqCst);
    }

    /// Returns the names of the devices with absent exports.
    pub fn names(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// Returns the absent exports of a device, with reasons.
    pub fn of(&self, name: &str) -> Vec<UnpublishedExport> {
        self.lock().get(name).cloned().unwrap_or_default()
    }

    /// Returns the absent exports of a device as an export set, without reasons.
    pub fn export_set(&self, name: &str) -> ExportSet {
        let all = self.of(name);
        let home = all.iter().any(|absent| absent.export.is_none());
        ExportSet {
            at_server_addresses: home,
            exports: all.into_iter().filter_map(|absent| absent.export).collect(),
        }
    }

    /// Adds all exports in `export_set` as absent, for the reason `why`.
    pub fn put_all(&self, name: &str, export_set: &ExportSet, why: &str) {
        let home = export_set.at_server_addresses.then_some(None);
        for export in home.into_iter().chain(export_set.exports.iter().cloned().map(Some)) {
            self.put(name, UnpublishedExport { export, why: why.to_owned() });
        }
    }

    /// Adds an absent export. Returns false if the export was absent for the same reason before.
    pub fn put(&self, name: &str, absent: UnpublishedExport) -> bool {
        let mut all = self.lock();
        let all = all.entry(name.to_owned()).or_default();
        match all.iter_mut().find(|known| known.export == absent.export) {
            Some(known) if known.why == absent.why => return false,
            Some(known) => *known = absent,
            None => all.push(absent),
        }
        true
    }

    /// Removes the absent export at the address `place`; `None` means the server's own addresses. Returns false if no
    /// such export is absent.
    pub fn remove(&self, name: &str, place: Option<&ExportAddress>) -> bool {
        let mut all = self.lock();
        let Some(of_device) = all.get_mut(name) else { return false };
        let before = of_device.len();
        of_device.retain(|absent| place.map_or(absent.export.is_some(), |place| !absent.is_at(place)));
        let is_removed = of_device.len() < before;
        if of_device.is_empty() {
            all.remove(name);
        }
        is_removed
    }

    /// Removes all absent exports and unparsed records of a device.
    pub fn forget(&self, name: &str) {
        self.lock().remove(name);
        self.lock_unparsed().remove(name);
    }

    fn lock_unparsed(&self) -> MutexGuard<'_, HashMap<String, Vec<UnparsedExport>>> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.unparsed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps exports of a device whose records cannot be parsed.
    pub fn put_unparsed(&self, name: &str, unparsed: Vec<UnparsedExport>) {
        if !unparsed.is_empty() {
            self.lock_unparsed().insert(name.to_owned(), unparsed);
        }
    }

    /// Returns the exports of a device whose records cannot be parsed.
    pub fn unparsed(&self, name: &str) -> Vec<UnparsedExport> {
        self.lock_unparsed().get(name).cloned().unwrap_or_default()
    }
}
