//! Exports of the state that cannot be published now: a directory does not exist yet, or an address is
//! not up or is taken. Such exports stay in the state, and [`again`](crate::again) retries them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use freestone_state::Export;

use crate::places::{Place, Seen, Wanted};

/// Absent exports of all devices.
#[derive(Default)]
pub struct AllAbsent {
    /// By device. Locked for a look or a change.
    all: Mutex<HashMap<String, Vec<Absent>>>,
    /// By device, exports whose records cannot be understood. Locked for a look or a change.
    unread: Mutex<HashMap<String, Vec<Unread>>>,
    /// A thread retries the absent exports.
    is_retried: AtomicBool,
}

/// An export of the state that cannot be understood, for example one that a newer version wrote. Such an
/// export is not retried, and its record stays unchanged until the device is unpublished.
#[derive(Debug, Clone)]
pub struct Unread {
    /// The record.
    pub record: Export,
    /// The reason.
    pub why: String,
}

impl Unread {
    /// Returns the place as text.
    pub fn place(&self) -> String {
        let Export { nbd, vhost_user, .. } = &self.record;
        nbd.as_ref().or(vhost_user.as_ref()).cloned().unwrap_or_else(|| "a block device".into())
    }
}

/// An export that is not published.
#[derive(Debug, Clone)]
pub struct Absent {
    /// The place, and true if it comes from the configuration file. `None`: the server's own addresses.
    pub export: Option<(Wanted, bool)>,
    /// The reason.
    pub why: String,
}

impl Absent {
    /// Returns the place as text.
    pub fn place(&self) -> String {
        self.export.as_ref().map_or("the server's addresses".into(), |(wanted, _)| wanted.place.to_string())
    }

    fn is_at(&self, place: &Place) -> bool {
        self.export.as_ref().is_some_and(|(wanted, _)| wanted.place.is(place))
    }
}

impl AllAbsent {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<Absent>>> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if there are exports to retry and no thread retries them. The caller then starts one.
    pub fn begin_retries(&self) -> bool {
        !self.names().is_empty() && !self.is_retried.swap(true, Ordering::SeqCst)
    }

    /// Notes that the thread has ended.
    pub fn end_retries(&self) {
        self.is_retried.store(false, Ordering::SeqCst);
    }

    /// Returns the names of devices with such exports.
    pub fn names(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// Returns the absent exports of a device.
    pub fn of(&self, name: &str) -> Vec<Absent> {
        self.lock().get(name).cloned().unwrap_or_default()
    }

    /// Returns the absent exports of a device as places.
    pub fn seen(&self, name: &str) -> Seen {
        let all = self.of(name);
        let home = all.iter().any(|absent| absent.export.is_none());
        Seen { home, exports: all.into_iter().filter_map(|absent| absent.export).collect() }
    }

    /// Adds all exports of a device as absent.
    pub fn put_all(&self, name: &str, seen: &Seen, why: &str) {
        let home = seen.home.then_some(None);
        for export in home.into_iter().chain(seen.exports.iter().cloned().map(Some)) {
            self.put(name, Absent { export, why: why.to_owned() });
        }
    }

    /// Adds an export. Returns false if it was absent for the same reason before.
    pub fn put(&self, name: &str, absent: Absent) -> bool {
        let mut all = self.lock();
        let all = all.entry(name.to_owned()).or_default();
        match all.iter_mut().find(|known| known.export == absent.export) {
            Some(known) if known.why == absent.why => return false,
            Some(known) => *known = absent,
            None => all.push(absent),
        }
        true
    }

    /// Removes the absent export at a place; `None`: the one for the server's own addresses. Returns false
    /// if there is none.
    pub fn remove(&self, name: &str, place: Option<&Place>) -> bool {
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

    /// Removes all exports of a device.
    pub fn forget(&self, name: &str) {
        self.lock().remove(name);
        self.lock_unread().remove(name);
    }

    fn lock_unread(&self) -> MutexGuard<'_, HashMap<String, Vec<Unread>>> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.unread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps exports of a device that cannot be understood.
    pub fn keep_unread(&self, name: &str, unread: Vec<Unread>) {
        if !unread.is_empty() {
            self.lock_unread().insert(name.to_owned(), unread);
        }
    }

    /// Returns the exports of a device that cannot be understood.
    pub fn unread(&self, name: &str) -> Vec<Unread> {
        self.lock_unread().get(name).cloned().unwrap_or_default()
    }
}
