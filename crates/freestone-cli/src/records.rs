//! The state of a server (`serve --state`): devices and exports that the next start restores.
//! [`recording`](crate::recording) writes the changes of verbs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use freestone_nbd::Address;
use freestone_spec::limits::{LimitSpec, LimitWords};
use freestone_spec::refusal::Errno;
use freestone_state::{Device, Export, State, StateError};

use crate::allow;
use crate::control::protocol::Fault;
use crate::paths::{address_text, parse_address};
use crate::places::{Place, Wanted};

/// Error for a key that only matters at the next start, without a state directory.
pub const NEEDS_STATE: &str = "needs a server with a state directory: serve --state DIR";

/// Reason of a missing device that is created as soon as its remote server answers.
pub const PENDING: &str = "its server has not answered yet";

/// How long the shutdown waits for pending changes.
const END_WAIT: Duration = Duration::from_secs(2);

/// The state and its pending changes. Empty if the server has no state directory.
#[derive(Default)]
pub struct Records {
    state: OnceLock<State>,
    /// The shutdown removes exports: changes must no longer be recorded.
    over: AtomicBool,
    /// Pending changes. The lock is held only while the count is read or changed.
    pending: Mutex<PendingChanges>,
    change_ended: Condvar,
    /// Reasons of missing devices: those that could not be created again. The lock is held only while the map
    /// is read or changed.
    missing: Mutex<BTreeMap<String, String>>,
}

/// Pending changes of the state.
#[derive(Default)]
struct PendingChanges {
    count: usize,
    /// The server is shutting down: see [`Records::end`].
    is_closed: bool,
}

/// Guard of a pending change. The shutdown waits until it is dropped.
pub struct Entered<'a>(&'a Records);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.pending().count -= 1;
        self.0.change_ended.notify_all();
    }
}

impl Records {
    /// Uses this state from now on.
    pub fn keep(&self, state: State) {
        // Called once, before verbs can run.
        let _ = self.state.set(state);
    }

    /// Returns the state, or `None` without a state directory.
    pub fn state(&self) -> Option<&State> {
        self.state.get()
    }

    /// Writes records at the start or end of the server.
    pub fn put_all(&self, devices: Vec<Device>) -> Result<(), Fault> {
        let Some(state) = self.state.get().filter(|_| !devices.is_empty()) else { return Ok(()) };
        state.put("serve", devices).map_err(|error| refused(&error))
    }

    /// Removes the records of devices after the start that created them has failed.
    pub fn forget_all(&self, names: &[&str]) -> Result<(), Fault> {
        let Some(state) = self.state.get().filter(|_| !names.is_empty()) else { return Ok(()) };
        let committed = state.begin("serve", names).and_then(|mut change| {
            for name in names {
                change.gone(name);
            }
            change.commit()
        });
        committed.map_err(|error| refused(&error))
    }

    /// Records at shutdown that these saves, by name and time, contain the current content of the devices.
    pub fn put_saved(&self, saved: &[(String, u64)]) -> Result<(), Fault> {
        let Some(state) = self.state.get() else { return Ok(()) };
        let with = |(name, stamp): &(String, u64)| {
            let is = state.find(name)?;
            let saved = Some(*stamp);
            (is.saved != saved).then_some(Device { saved, ..is })
        };
        self.put_all(saved.iter().filter_map(with).collect())
    }

    /// Returns true if changes are no longer recorded, because the shutdown removes exports.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    fn pending(&self) -> MutexGuard<'_, PendingChanges> {
        // A panic cannot leave the count inconsistent, so poisoning is ignored.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a change, which ends when the guard is dropped.
    ///
    /// # Errors
    /// The server is shutting down.
    pub fn enter(&self, names: &[&str]) -> Result<Entered<'_>, Fault> {
        let mut pending = self.pending();
        if pending.is_closed {
            return Err(too_late(&names.join(", ")));
        }
        pending.count += 1;
        Ok(Entered(self))
    }

    /// Removes a device from the missing ones: it exists again, was replaced, or was given up.
    pub fn found(&self, name: &str) {
        self.missing().remove(name);
    }

    /// Closes the records at shutdown, before exports are removed. New changes fail. Waits for pending changes
    /// for a short time; a change that commits later fails.
    pub fn end(&self) {
        let mut pending = self.pending();
        pending.is_closed = true;
        let waited = self.change_ended.wait_timeout_while(pending, END_WAIT, |pending| pending.count > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        self.over.store(true, Ordering::SeqCst);
    }

    fn missing(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        // A panic cannot leave the map inconsistent, so poisoning is ignored.
        self.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks a device as missing: it could not be created again. Its record remains.
    pub fn miss(&self, name: &str, why: &str) {
        let why = why.strip_prefix(name).and_then(|why| why.strip_prefix(": ")).unwrap_or(why);
        self.missing().insert(name.to_owned(), why.to_owned());
    }

    /// Returns the missing devices with their reasons.
    pub fn all_missing(&self) -> Vec<(String, String)> {
        self.missing().iter().map(|(name, why)| (name.clone(), why.clone())).collect()
    }

    /// Returns true if a device waits for its remote server.
    pub fn is_pending(&self, name: &str) -> bool {
        self.missing().get(name).is_some_and(|why| why == PENDING)
    }

    /// Returns the reason why a device is missing.
    pub fn why_missing(&self, name: &str) -> Option<String> {
        self.missing().get(name).cloned()
    }
}

/// Returns the error for a change during the shutdown.
pub fn too_late(names: &str) -> Fault {
    Fault::failed(Errno::ECANCELED, format!("{names}: the server is shutting down"))
}

/// Returns the error for a change that the state cannot record.
pub fn refused(error: &StateError) -> Fault {
    let errno = match error {
        StateError::Write(_, error) => match error.kind() {
            std::io::ErrorKind::ReadOnlyFilesystem => Errno::EROFS,
            _ => Errno::of_file(error),
        },
        _ => Errno::EIO,
    };
    Fault::failed(errno, format!("cannot update the state: {error}"))
}

/// Returns the record of an export.
pub fn export(wanted: &Wanted, declared: bool) -> Export {
    let read_only = wanted.read_only;
    let allow = wanted.allow.as_ref().map(allow::words).unwrap_or_default();
    let limits = wanted.limits.words().map(|(key, text)| (key.to_owned(), text)).collect();
    let none = Export { nbd: None, vhost_user: None, ublk: None, read_only, allow, declared, limits };
    match &wanted.place {
        Place::Nbd(at) => Export { nbd: Some(address_text(at)), ..none },
        Place::VhostUser(path) => {
            Export { vhost_user: Some(address_text(&Address::Unix(path.clone()))), ..none }
        }
        Place::Ublk(queues) => Export { ublk: Some(*queues), ..none },
    }
}

/// Parses the record of an export.
///
/// # Errors
/// The end of a sentence that begins with the device.
pub fn wanted(export: &Export) -> Result<Wanted, String> {
    let place = match export {
        Export { nbd: Some(text), .. } => Place::Nbd(parse_address(text, None)?),
        Export { vhost_user: Some(text), .. } => Place::vhost_user(text, None)?,
        Export { ublk: Some(queues), .. } => Place::Ublk(*queues),
        _ => return Err("an export has no address".into()),
    };
    let is_allowed = !export.allow.is_empty();
    let allow = is_allowed.then(|| allow::parse(&export.allow)).transpose();
    let allow = allow.map_err(|why| format!("an export is not published: allow: {why}"))?;
    let mut words = LimitWords::default();
    for (key, text) in &export.limits {
        if !words.take(key, text)? {
            return Err(format!("{key}: an export has no such limit"));
        }
    }
    let limits = words.over(LimitSpec::default());
    Ok(Wanted { place, read_only: export.read_only, allow, limits })
}
