//! Withheld devices: devices that are not published until the user runs `freestone publish`, mostly because
//! they lost content with the previous server.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::places::Seen;

/// Withheld devices by name. The lock is held only while the map is read or changed.
#[derive(Default)]
pub struct Withheld(Mutex<HashMap<String, Withholding>>);

/// Why one device is withheld, and where it is published afterwards.
pub struct Withholding {
    pub seen: Seen,
    /// The reason, if the device has not lost content.
    whole: Option<&'static str>,
}

impl Withheld {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Withholding>> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Withholds a device that has lost content. `seen` contains its exports for a later release.
    pub fn put(&self, name: &str, seen: Seen) {
        self.lock().insert(name.to_owned(), Withholding { seen, whole: None });
    }

    /// Withholds a device that has not lost content, for this reason.
    pub fn put_whole(&self, name: &str, seen: Seen, why: &'static str) {
        self.lock().insert(name.to_owned(), Withholding { seen, whole: Some(why) });
    }

    /// Puts back what [`take`](Self::take) returned.
    pub fn put_back(&self, name: &str, withholding: Withholding) {
        self.lock().insert(name.to_owned(), withholding);
    }

    /// Changes where a withheld device is published afterwards.
    pub fn set_seen(&self, name: &str, seen: Seen) {
        if let Some(withholding) = self.lock().get_mut(name) {
            withholding.seen = seen;
        }
    }

    /// Returns true if a device is withheld because it lost content. The next start withholds it as well.
    pub fn has_lost(&self, name: &str) -> bool {
        self.lock().get(name).is_some_and(|withholding| withholding.whole.is_none())
    }

    /// Returns the reason why a device without lost content is withheld.
    pub fn why_whole(&self, name: &str) -> Option<&'static str> {
        self.lock().get(name)?.whole
    }

    /// Returns true if the device is withheld.
    pub fn has(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// Returns the exports that a withheld device gets when it is released, or `None` if it is not withheld.
    pub fn of(&self, name: &str) -> Option<Seen> {
        self.lock().get(name).map(|one| one.seen.clone())
    }

    /// Releases a device, and returns its exports and reason.
    pub fn take(&self, name: &str) -> Option<Withholding> {
        self.lock().remove(name)
    }
}
