//! What is there after the next start (`serve --state`), beside the devices and exports themselves:
//! [`recording`](crate::recording) has how verbs change it.

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

/// Why what is said of the next start is refused.
pub const NEEDS_STATE: &str = "says what the next start does, of a server with a state: serve --state DIR";

/// Why a device is missing that is made again when its server answers.
pub const PENDING: &str = "its server has not answered yet";

/// How long the end of the server waits for changes that are under way.
const END_WAIT: Duration = Duration::from_secs(2);

/// Nothing, where the server keeps no state.
#[derive(Default)]
pub struct Records {
    state: OnceLock<State>,
    /// The server ends, and its exports go: where devices are to be seen from now on is not where the
    /// next start shows them.
    over: AtomicBool,
    /// Changes that have begun. Locked for a look or a change.
    under_way: Mutex<UnderWay>,
    one_is_over: Condvar,
    /// Devices that could not be made again, and why. Locked for a look or a change.
    missing: Mutex<BTreeMap<String, String>>,
}

/// See [`Records::end`].
#[derive(Default)]
struct UnderWay {
    changes: usize,
    ends: bool,
}

/// A change that has begun: the end of the server waits for it.
pub struct Entered<'a>(&'a Records);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.under_way().changes -= 1;
        self.0.one_is_over.notify_all();
    }
}

impl Records {
    /// From now on.
    pub fn keep(&self, state: State) {
        // Once, before there are verbs.
        let _ = self.state.set(state);
    }

    /// The state, where there is one.
    pub fn state(&self) -> Option<&State> {
        self.state.get()
    }

    /// Commits what is to be known of these devices when the server begins or ends.
    pub fn put_all(&self, devices: Vec<Device>) -> Result<(), Fault> {
        let Some(state) = self.state.get().filter(|_| !devices.is_empty()) else { return Ok(()) };
        state.put("serve", devices).map_err(|error| refused(&error))
    }

    /// Commits that these devices are gone, as the start that made them has failed.
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

    /// The server ends, and these saves have what the devices hold.
    pub fn put_saved(&self, saved: &[(String, u64)]) -> Result<(), Fault> {
        let Some(state) = self.state.get() else { return Ok(()) };
        let with = |(name, stamp): &(String, u64)| {
            let is = state.find(name)?;
            let saved = Some(*stamp);
            (is.saved != saved).then_some(Device { saved, ..is })
        };
        self.put_all(saved.iter().filter_map(with).collect())
    }

    /// Whether the server has ended, for changes that came too late.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    fn under_way(&self) -> MutexGuard<'_, UnderWay> {
        // Nothing in here can be half done.
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A change begins, and goes on until the guard is dropped; not where the server ends.
    pub fn enter(&self, names: &[&str]) -> Result<Entered<'_>, Fault> {
        let mut under_way = self.under_way();
        if under_way.ends {
            return Err(too_late(&names.join(", ")));
        }
        under_way.changes += 1;
        Ok(Entered(self))
    }

    /// A device is there again, or another one in its place; or nobody wants it any more.
    pub fn found(&self, name: &str) {
        self.missing().remove(name);
    }

    /// The server ends: no change begins any more, and those under way are waited for a while, before
    /// exports go. One that has not committed by then is refused.
    pub fn end(&self) {
        let mut under_way = self.under_way();
        under_way.ends = true;
        let waited = self.one_is_over.wait_timeout_while(under_way, END_WAIT, |all| all.changes > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        self.over.store(true, Ordering::SeqCst);
    }

    fn missing(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        // Nothing in here can be half done.
        self.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device could not be made again; what is known of it stays.
    pub fn miss(&self, name: &str, why: &str) {
        let why = why.strip_prefix(name).and_then(|why| why.strip_prefix(": ")).unwrap_or(why);
        self.missing().insert(name.to_owned(), why.to_owned());
    }

    /// Those devices, and why.
    pub fn all_missing(&self) -> Vec<(String, String)> {
        self.missing().iter().map(|(name, why)| (name.clone(), why.clone())).collect()
    }

    /// Returns true if a device is made again when its server answers.
    pub fn is_pending(&self, name: &str) -> bool {
        self.missing().get(name).is_some_and(|why| why == PENDING)
    }

    /// Why the device of that name could not be made again.
    pub fn why_missing(&self, name: &str) -> Option<String> {
        self.missing().get(name).cloned()
    }
}

/// Why a verb fails that would change these devices when the server ends.
pub fn too_late(names: &str) -> Fault {
    Fault::failed(Errno::ECANCELED, format!("{names}: the server is shutting down"))
}

/// Why a verb fails whose change cannot be kept.
pub fn refused(error: &StateError) -> Fault {
    let errno = match error {
        StateError::Write(_, error) => match error.kind() {
            std::io::ErrorKind::ReadOnlyFilesystem => Errno::EROFS,
            _ => Errno::of_file(error),
        },
        _ => Errno::EIO,
    };
    Fault::failed(errno, format!("the state is not kept: {error}"))
}

/// A place as a record has it.
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

/// A place as it is in a record; half a sentence where it is none.
pub fn wanted(export: &Export) -> Result<Wanted, String> {
    let place = match export {
        Export { nbd: Some(text), .. } => Place::Nbd(parse_address(text, None)?),
        Export { vhost_user: Some(text), .. } => Place::vhost_user(text, None)?,
        Export { ublk: Some(queues), .. } => Place::Ublk(*queues),
        _ => return Err("an export is nowhere".into()),
    };
    let is_allowed = !export.allow.is_empty();
    let allow = is_allowed.then(|| allow::parse(&export.allow)).transpose();
    let allow = allow.map_err(|why| format!("an export is not shown: allow: {why}"))?;
    let mut words = LimitWords::default();
    for (key, text) in &export.limits {
        if !words.take(key, text)? {
            return Err(format!("{key}: an export has no such limit"));
        }
    }
    let limits = words.over(LimitSpec::default());
    Ok(Wanted { place, read_only: export.read_only, allow, limits })
}
