//! The state directory of a server (`serve --state`): devices and exports that the next start restores.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use freestone_control::protocol::RpcError;
use freestone_core::sync::{Condvar, Mutex};
use freestone_nbd::Address;
use freestone_spec::limits::{LimitSpec, LimitWords};
use freestone_spec::refusal::Errno;
use freestone_state::{Device, Export, State, StateError};

use crate::exports::export_spec::{ExportAddress, ExportSpec};
use crate::settings::allow;
use crate::settings::paths::{address_text, parse_address};

/// Error message for a key that only affects the next start, on a server without a state directory.
pub const NEEDS_STATE: &str = "needs a server with a state directory: serve --state DIR";

/// Reason of a missing device that is created as soon as its remote server answers.
pub const PENDING: &str = "its server has not answered yet";

/// Longest wait of the shutdown for pending changes.
const END_WAIT: Duration = Duration::from_secs(2);

/// The state directory and the changes of it in progress. Empty if the server has no state directory.
#[derive(Default)]
pub struct Records {
    state: OnceLock<Arc<State>>,
    /// True once the shutdown removes exports: changes must no longer be recorded.
    closed: AtomicBool,
    /// Changes in progress. The lock is held only while the count is read or changed.
    pending: Mutex<PendingChanges>,
    change_ended: Condvar,
    /// Missing devices, which are recorded but could not be created again, with the reasons. The lock is held only
    /// while the map is read or changed.
    missing: Mutex<BTreeMap<String, String>>,
}

/// Changes of the state directory in progress.
#[derive(Default)]
struct PendingChanges {
    count: usize,
    /// True once the server is shutting down: new changes fail. See [`Records::close`].
    is_closed: bool,
}

/// Guard of a pending change. The shutdown waits until the guard is dropped.
pub struct PendingChange<'a>(&'a Records);

impl Drop for PendingChange<'_> {
    fn drop(&mut self) {
        self.0.pending.lock().count -= 1;
        self.0.change_ended.notify_all();
    }
}

impl Records {
    /// Sets the opened state directory, in which changes are recorded from now on.
    pub fn set_state(&self, state: State) {
        // Called once, before verbs can run, so `set` does not fail.
        let _ = self.state.set(Arc::new(state));
    }

    /// Returns the opened state directory, or `None` if the server has none.
    pub fn state(&self) -> Option<&State> {
        self.state.get().map(Arc::as_ref)
    }

    /// Returns a reference to the state directory that does not keep the devices alive.
    pub fn shared_state(&self) -> Option<Arc<State>> {
        self.state.get().cloned()
    }

    /// Writes the records of devices at the start or end of the server, if it has a state directory.
    pub fn put_all(&self, devices: Vec<Device>) -> Result<(), RpcError> {
        let Some(state) = self.state.get().filter(|_| !devices.is_empty()) else { return Ok(()) };
        state.put("serve", devices).map_err(|error| state_error(&error))
    }

    /// Removes the records of devices if the start that created the devices has failed.
    pub fn forget_all(&self, names: &[&str]) -> Result<(), RpcError> {
        let Some(state) = self.state.get().filter(|_| !names.is_empty()) else { return Ok(()) };
        let committed = state.begin("serve", names).and_then(|mut change| {
            for name in names {
                change.remove(name);
            }
            change.commit()
        });
        committed.map_err(|error| state_error(&error))
    }

    /// Records at shutdown that these saves, by device name and time, contain the current content of the devices.
    pub fn put_saved(&self, saved: &[(String, u64)]) -> Result<(), RpcError> {
        let Some(state) = self.state.get() else { return Ok(()) };
        let with = |(name, stamp): &(String, u64)| {
            let is = state.find(name)?;
            let saved = Some(*stamp);
            (is.saved != saved).then_some(Device { saved, ..is })
        };
        self.put_all(saved.iter().filter_map(with).collect())
    }

    /// Returns true if changes are no longer recorded, because the shutdown removes exports.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Begins a change, which ends when the guard is dropped.
    ///
    /// # Errors
    /// Fails if the server is shutting down.
    pub fn begin_change(&self, names: &[&str]) -> Result<PendingChange<'_>, RpcError> {
        let mut pending = self.pending.lock();
        if pending.is_closed {
            return Err(shutdown_error(&names.join(", ")));
        }
        pending.count += 1;
        Ok(PendingChange(self))
    }

    /// Removes a device from the missing devices: it exists again, was replaced, or was given up.
    pub fn remove_missing(&self, name: &str) {
        self.missing.lock().remove(name);
    }

    /// Closes the records at shutdown, before exports are removed: new changes fail. Waits for pending changes for at
    /// most [`END_WAIT`]; a change that commits later fails.
    pub fn close(&self) {
        let mut pending = self.pending.lock();
        pending.is_closed = true;
        let waited = self.change_ended.wait_timeout_while(pending, END_WAIT, |pending| pending.count > 0);
        drop(waited);
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Marks a device as missing, because it could not be created again. Its record in the state remains.
    pub fn add_missing(&self, name: &str, why: &str) {
        let why = why.strip_prefix(name).and_then(|why| why.strip_prefix(": ")).unwrap_or(why);
        self.missing.lock().insert(name.to_owned(), why.to_owned());
    }

    /// Returns the names of the missing devices, each with the reason.
    pub fn all_missing(&self) -> Vec<(String, String)> {
        self.missing.lock().iter().map(|(name, why)| (name.clone(), why.clone())).collect()
    }

    /// Returns true if a device is missing because its remote server has not answered yet.
    pub fn is_pending(&self, name: &str) -> bool {
        self.missing.lock().get(name).is_some_and(|why| why == PENDING)
    }

    /// Returns the reason why a device is missing, or `None` if it is not.
    pub fn why_missing(&self, name: &str) -> Option<String> {
        self.missing.lock().get(name).cloned()
    }
}

/// Returns the error for a change during the shutdown.
pub fn shutdown_error(names: &str) -> RpcError {
    rpc_error!(ECANCELED, "{names}: the server is shutting down")
}

/// Returns the error for a change that cannot be written to the state directory.
pub fn state_error(error: &StateError) -> RpcError {
    let errno = match error {
        StateError::Write(_, error) => match error.kind() {
            std::io::ErrorKind::ReadOnlyFilesystem => Errno::EROFS,
            _ => Errno::of_file(error),
        },
        _ => Errno::EIO,
    };
    RpcError::failed(errno, format!("cannot update the state: {error}"))
}

/// Returns the state record of an export.
pub fn export_record(wanted: &ExportSpec) -> Export {
    let ExportSpec { read_only, declared, .. } = *wanted;
    let allow = wanted.allow.as_ref().map(allow::words).unwrap_or_default();
    let limits = wanted.limits.words().map(|(key, text)| (key.to_owned(), text)).collect();
    let none = Export { nbd: None, vhost_user: None, ublk: None, read_only, allow, declared, limits };
    match &wanted.address {
        ExportAddress::Nbd(at) => Export { nbd: Some(address_text(at)), ..none },
        ExportAddress::VhostUser(path) => {
            Export { vhost_user: Some(address_text(&Address::Unix(path.clone()))), ..none }
        }
        ExportAddress::Ublk(queues) => Export { ublk: Some(*queues), ..none },
    }
}

/// Parses the state record of an export.
///
/// # Errors
/// Returns the reason without the device name, which the caller puts before it.
pub fn parse_export(export: &Export) -> Result<ExportSpec, String> {
    let place = match export {
        Export { nbd: Some(text), .. } => ExportAddress::Nbd(parse_address(text, None)?),
        Export { vhost_user: Some(text), .. } => ExportAddress::vhost_user(text, None)?,
        Export { ublk: Some(queues), .. } => ExportAddress::Ublk(*queues),
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
    let limits = words.apply_to(LimitSpec::default());
    let Export { read_only, declared, .. } = *export;
    Ok(ExportSpec { address: place, read_only, allow, limits, declared })
}
