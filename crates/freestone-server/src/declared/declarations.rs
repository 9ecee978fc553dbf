//! Devices and exports that configuration files have declared. Applying a later file removes the devices and
//! exports that it no longer declares; devices and exports made by verbs remain.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use freestone_nbd::AllowList;
use freestone_spec::limits::LimitSpec;

use crate::exports::export_spec::{ExportAddress, ExportSpec};
use crate::exports::standalone_export::PublishedExport;

/// Declared exports by device name: the specification, and the actual address with the port that was chosen.
/// The lock is held only while the map is read or changed.
#[derive(Default)]
pub struct Declarations(Mutex<HashMap<String, Vec<(ExportSpec, ExportAddress)>>>);

impl Declarations {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<(ExportSpec, ExportAddress)>>> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a file has declared a device.
    pub fn declare(&self, name: &str) {
        self.lock().entry(name.to_owned()).or_default();
    }

    /// Records that a file has declared an export of a device.
    pub fn declare_export(&self, name: &str, wanted: &ExportSpec, shown: &PublishedExport) {
        let place = match shown {
            PublishedExport::Nbd(address) => ExportAddress::Nbd(address.clone()),
            PublishedExport::Standalone(export) => export.spec().address,
        };
        self.lock().entry(name.to_owned()).or_default().push((wanted.clone(), place));
    }

    /// Changes the allow list of the device's declared exports at `place`.
    pub fn allow(&self, name: &str, place: &ExportAddress, list: Option<&AllowList>) {
        if let Some(exports) = self.lock().get_mut(name) {
            for (wanted, _) in exports.iter_mut().filter(|(_, at)| at.is_same(place)) {
                wanted.allow = list.cloned();
            }
        }
    }

    /// Changes the limits of the device's declared exports at `place`.
    pub fn limit_export(&self, name: &str, place: &ExportAddress, limits: LimitSpec) {
        for (wanted, at) in self.lock().get_mut(name).into_iter().flatten() {
            if at.is_same(place) || at == place {
                wanted.limits = limits;
            }
        }
    }

    /// Removes the declarations of a device and of its exports.
    pub fn forget(&self, name: &str) {
        self.lock().remove(name);
    }

    /// Returns the names of all declared devices.
    pub fn names(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// Returns true if a file has declared the device.
    pub fn has(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// Returns the declared exports of a device, each as specified and with its actual address.
    pub fn of(&self, name: &str) -> Vec<(ExportSpec, ExportAddress)> {
        self.lock().get(name).cloned().unwrap_or_default()
    }

    /// Removes the declarations of all exports of a device. The device itself remains declared.
    pub fn forget_exports(&self, name: &str) {
        if let Some(exports) = self.lock().get_mut(name) {
            exports.clear();
        }
    }

    /// Removes the declaration of the device's export at `place`.
    pub fn forget_export(&self, name: &str, place: &ExportAddress) {
        if let Some(exports) = self.lock().get_mut(name) {
            exports.retain(|(_, at)| at != place);
        }
    }
}
