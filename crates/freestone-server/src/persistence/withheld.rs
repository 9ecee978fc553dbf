//! Withheld devices: devices that are not published until the user runs `freestone publish`, mostly because
//! they lost content with the previous server.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::exports::export_spec::ExportSet;

/// Withheld devices by name. The lock is held only while the map is read or changed.
#[derive(Default)]
pub struct Withheld(Mutex<HashMap<String, WithheldDevice>>);

/// Reason why a device is withheld, and the exports to publish when it is released.
pub struct WithheldDevice {
    pub export_set: ExportSet,
    /// Reason other than lost content, or `None` if the device has lost content.
    other_reason: Option<&'static str>,
}

impl Withheld {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, WithheldDevice>> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Withholds a device that has lost content. `export_set` contains the exports to publish when it is
    /// released.
    pub fn put(&self, name: &str, export_set: ExportSet) {
        self.lock().insert(name.to_owned(), WithheldDevice { export_set, other_reason: None });
    }

    /// Withholds a device that has not lost content, for the reason `why`.
    pub fn put_without_loss(&self, name: &str, export_set: ExportSet, why: &'static str) {
        self.lock().insert(name.to_owned(), WithheldDevice { export_set, other_reason: Some(why) });
    }

    /// Withholds a device again that [`take`](Self::take) has released.
    pub fn put_back(&self, name: &str, withheld_device: WithheldDevice) {
        self.lock().insert(name.to_owned(), withheld_device);
    }

    /// Changes the exports to publish when a withheld device is released.
    pub fn set_exports(&self, name: &str, export_set: ExportSet) {
        if let Some(withheld_device) = self.lock().get_mut(name) {
            withheld_device.export_set = export_set;
        }
    }

    /// Returns true if a device is withheld because it lost content. The next start withholds it as well.
    pub fn has_lost_content(&self, name: &str) -> bool {
        self.lock().get(name).is_some_and(|withheld_device| withheld_device.other_reason.is_none())
    }

    /// Returns the reason other than lost content why a device is withheld, or `None`.
    pub fn other_reason(&self, name: &str) -> Option<&'static str> {
        self.lock().get(name)?.other_reason
    }

    /// Returns true if the device is withheld.
    pub fn has(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// Returns the exports to publish when a withheld device is released, or `None` if it is not withheld.
    pub fn of(&self, name: &str) -> Option<ExportSet> {
        self.lock().get(name).map(|one| one.export_set.clone())
    }

    /// Releases a device, and returns its exports and reason, or `None` if it is not withheld.
    pub fn take(&self, name: &str) -> Option<WithheldDevice> {
        self.lock().remove(name)
    }
}
