//! What files have declared so far: that is theirs to take away again.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use freestone_nbd::AllowList;
use freestone_spec::limits::LimitSpec;

use crate::alone::Shown;
use crate::places::{Place, Wanted};

/// By device: the places, and where those came to be. Locked for a look or a change.
#[derive(Default)]
pub struct Declarations(Mutex<HashMap<String, Vec<(Wanted, Place)>>>);

impl Declarations {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<(Wanted, Place)>>> {
        // Nothing in here can be half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device is a file's.
    pub fn declare(&self, name: &str) {
        self.lock().entry(name.to_owned()).or_default();
    }

    /// So is this export of it.
    pub fn declare_export(&self, name: &str, wanted: &Wanted, shown: &Shown) {
        let place = match shown {
            Shown::Nbd(address) => Place::Nbd(address.clone()),
            Shown::Alone(export) => export.wanted().place,
        };
        self.lock().entry(name.to_owned()).or_default().push((wanted.clone(), place));
    }

    /// Who may connect to an export of a file is said otherwise.
    pub fn allow(&self, name: &str, place: &Place, list: Option<&AllowList>) {
        if let Some(exports) = self.lock().get_mut(name) {
            for (wanted, _) in exports.iter_mut().filter(|(_, at)| at.is(place)) {
                wanted.allow = list.cloned();
            }
        }
    }

    /// It lets through something else.
    pub fn limit_export(&self, name: &str, place: &Place, limits: LimitSpec) {
        for (wanted, at) in self.lock().get_mut(name).into_iter().flatten() {
            if at.is(place) || at == place {
                wanted.limits = limits;
            }
        }
    }

    /// A device is gone.
    pub fn forget(&self, name: &str) {
        self.lock().remove(name);
    }

    /// All devices.
    pub fn names(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// Whether a device is a file's.
    pub fn has(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// The exports of one.
    pub fn of(&self, name: &str) -> Vec<(Wanted, Place)> {
        self.lock().get(name).cloned().unwrap_or_default()
    }

    /// Its exports are gone.
    pub fn forget_exports(&self, name: &str) {
        if let Some(exports) = self.lock().get_mut(name) {
            exports.clear();
        }
    }

    /// An export is gone.
    pub fn forget_export(&self, name: &str, place: &Place) {
        if let Some(exports) = self.lock().get_mut(name) {
            exports.retain(|(_, at)| at != place);
        }
    }
}
