//! Devices and exports that configuration files have declared. A later file removes those that it no longer
//! declares; devices and exports made by verbs remain.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use freestone_nbd::AllowList;
use freestone_spec::limits::LimitSpec;

use crate::alone::Shown;
use crate::places::{Place, Wanted};

/// Declared exports by device: the specification, and the actual address with the port that was chosen. The
/// lock is held only while the map is read or changed.
#[derive(Default)]
pub struct Declarations(Mutex<HashMap<String, Vec<(Wanted, Place)>>>);

impl Declarations {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<(Wanted, Place)>>> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a file has declared a device.
    pub fn declare(&self, name: &str) {
        self.lock().entry(name.to_owned()).or_default();
    }

    /// Records that a file has declared an export of a device.
    pub fn declare_export(&self, name: &str, wanted: &Wanted, shown: &Shown) {
        let place = match shown {
            Shown::Nbd(address) => Place::Nbd(address.clone()),
            Shown::Alone(export) => export.wanted().place,
        };
        self.lock().entry(name.to_owned()).or_default().push((wanted.clone(), place));
    }

    /// Changes the allow list of a declared export.
    pub fn allow(&self, name: &str, place: &Place, list: Option<&AllowList>) {
        if let Some(exports) = self.lock().get_mut(name) {
            for (wanted, _) in exports.iter_mut().filter(|(_, at)| at.is(place)) {
                wanted.allow = list.cloned();
            }
        }
    }

    /// Changes the limits of a declared export.
    pub fn limit_export(&self, name: &str, place: &Place, limits: LimitSpec) {
        for (wanted, at) in self.lock().get_mut(name).into_iter().flatten() {
            if at.is(place) || at == place {
                wanted.limits = limits;
            }
        }
    }

    /// Removes a device and its exports.
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

    /// Returns the declared exports of a device.
    pub fn of(&self, name: &str) -> Vec<(Wanted, Place)> {
        self.lock().get(name).cloned().unwrap_or_default()
    }

    /// Removes all exports of a device.
    pub fn forget_exports(&self, name: &str) {
        if let Some(exports) = self.lock().get_mut(name) {
            exports.clear();
        }
    }

    /// Removes an export of a device.
    pub fn forget_export(&self, name: &str, place: &Place) {
        if let Some(exports) = self.lock().get_mut(name) {
            exports.retain(|(_, at)| at != place);
        }
    }
}
