//! What is there after the next start (`serve --state`): the devices, and where they are to be seen.
//!
//! A verb that changes any of that begins a [`Recording`] of the names that it has claimed, before it
//! does anything. When all is done it commits: what is then to be said of these names is asked of the
//! devices and exports themselves, so no verb says it in words of its own.

use std::collections::BTreeMap;
use std::env;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use freestone::mutants::{self, Mutant};
use freestone_nbd::Address;
use freestone_spec::kinds::Entry;
use freestone_spec::refusal::Errno;
use freestone_state::{Change, Device, Export, State, StateError};

use crate::claims::Claim;
use crate::control::protocol::Fault;
use crate::paths::{address_text, parse_address};
use crate::places::{Place, Seen, Wanted};
use crate::service::Service;

/// Why what is said of the next start is refused.
pub const NEEDS_STATE: &str = "says what the next start does, of a server with a state: serve --state DIR";

/// Nothing, where the server keeps no state.
#[derive(Default)]
pub struct Records {
    state: OnceLock<State>,
    /// The server ends, and its exports go: where devices are to be seen from now on is not where the
    /// next start shows them.
    over: AtomicBool,
    /// Devices that could not be made again, and why. Locked for a look or a change.
    missing: Mutex<BTreeMap<String, String>>,
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

    /// What a server begins with, before anybody sees it: each with where it is to be seen.
    pub fn put<'a>(
        &self,
        service: &Service,
        devices: impl Iterator<Item = (&'a Entry, Seen)>,
    ) -> Result<(), Fault> {
        let Some(state) = self.state.get() else { return Ok(()) };
        let now = devices.map(|(entry, seen)| device(service, entry, &seen));
        let changed: Vec<Device> = now.filter(|now| state.find(&now.name).as_ref() != Some(now)).collect();
        if changed.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = changed.iter().map(|device| device.name.as_str()).collect();
        let mut change = state.begin("serve", &names).map_err(|error| refused(&error))?;
        for device in &changed {
            change.put(device.clone());
        }
        change.commit().map_err(|error| refused(&error))
    }

    /// The server ends, and these saves have what the devices hold.
    pub fn put_saved(&self, saved: &[(String, u64)]) -> Result<(), Fault> {
        let Some(state) = self.state.get().filter(|_| !saved.is_empty()) else { return Ok(()) };
        let names: Vec<&str> = saved.iter().map(|(name, _)| name.as_str()).collect();
        let mut change = state.begin("serve", &names).map_err(|error| refused(&error))?;
        for (name, stamp) in saved {
            if let Some(device) = state.find(name) {
                change.put(Device { saved: Some(*stamp), ..device });
            }
        }
        change.commit().map_err(|error| refused(&error))
    }

    /// Whether a device is otherwise than what is kept.
    pub fn differs(&self, service: &Service, entry: &Entry) -> bool {
        let known = |state: &State| state.find(entry.name());
        let now = || device(service, entry, &seen(service, entry.name()));
        self.state.get().is_some_and(|state| known(state) != Some(now()))
    }

    /// The server ends: all is kept as it is now. A verb that has not committed yet is refused.
    pub fn end(&self) {
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

    /// Why the device of that name could not be made again.
    pub fn why_missing(&self, name: &str) -> Option<String> {
        self.missing().get(name).cloned()
    }
}

/// A change of devices that has begun.
pub struct Recording<'a> {
    service: &'a Service,
    names: Vec<String>,
    change: Option<(&'a State, Change<'a>)>,
}

impl<'a> Recording<'a> {
    /// A verb is about to change these devices, which it has claimed.
    pub fn begin(service: &'a Service, _: &Claim<'_>, verb: &str, names: &[&str]) -> Result<Self, Fault> {
        let Some(state) = service.records.state.get() else {
            return Ok(Self { service, names: Vec::new(), change: None });
        };
        let change = Some((state, state.begin(verb, names).map_err(|error| refused(&error))?));
        Ok(Self { service, names: names.iter().map(|name| (*name).to_owned()).collect(), change })
    }

    /// All is done. Durable when this returns.
    pub fn commit(self) -> Result<(), Fault> {
        let Self { service, names, change } = self;
        let Some((state, mut change)) = change else { return Ok(()) };
        for name in &names {
            let old = state.find(name);
            match (service.registry.find(name).filter(|entry| entry.template.is_none()), old) {
                (Some(entry), old) => {
                    service.records.missing().remove(name);
                    let now = device(service, &entry, &seen(service, name));
                    if old.as_ref() != Some(&now) {
                        change.put(now);
                    }
                }
                // It is as little there as before.
                (None, Some(_)) if service.records.why_missing(name).is_some() => {}
                (None, Some(_)) => change.gone(name),
                (None, None) => {}
            }
        }
        // After the look at the exports: where it is not over yet, none of them had gone then.
        if service.records.over.load(Ordering::SeqCst) {
            let why = format!("{}: the server is shutting down", names.join(", "));
            return Err(Fault::failed(Errno::ECANCELED, why));
        }
        change.commit().map_err(|error| refused(&error))
    }

    /// Devices that could not be made again are forgotten, too.
    pub fn forget_missing(&self) {
        let mut missing = self.service.records.missing();
        for name in &self.names {
            missing.remove(name);
        }
    }
}

fn refused(error: &StateError) -> Fault {
    let errno = match error {
        StateError::Write(_, error) => match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => Errno::ENOSPC,
            std::io::ErrorKind::ReadOnlyFilesystem => Errno::EROFS,
            _ => Errno::EIO,
        },
        _ => Errno::EIO,
    };
    Fault::failed(errno, format!("the state is not kept: {error}"))
}

/// Where a device is to be seen; where it is withheld, once it no longer is.
pub fn seen(service: &Service, name: &str) -> Seen {
    if let Some(seen) = service.withheld.of(name) {
        return seen;
    }
    let declared = service.declarations.of(name);
    let is_declared = |place: &Place| declared.iter().any(|(_, at)| at.is(place) || at == place);
    let with = |wanted: Wanted| {
        let declared = is_declared(&wanted.place);
        (wanted, declared)
    };
    let exports = service.exports.wanted(name).into_iter().map(with).collect();
    Seen { home: service.exports.is_at_home(name), exports }
}

/// What is to be known of a device after the next start.
fn device(service: &Service, entry: &Entry, seen: &Seen) -> Device {
    let name = entry.name();
    let left_out = mutants::on(Mutant::ExportsForgotten);
    let exports = seen.exports.iter().filter(|_| !left_out);
    Device {
        name: name.to_owned(),
        uuid: entry.identity.uuid.simple().to_string(),
        generation: entry.identity.generation,
        withheld: service.withheld.has(name),
        // It goes on.
        saved: None,
        words: words(entry),
        declared: service.declarations.has(name),
        home: seen.home,
        exports: exports.map(|(wanted, declared)| export(wanted, *declared)).collect(),
    }
}

/// The words that make it again, wherever the next server is started.
fn words(entry: &Entry) -> String {
    let mut words = entry.words.now(&entry.spec);
    // What may be overwritten was said of one time.
    words.pairs.retain(|(key, _)| key != "force" && key != "publish");
    match env::current_dir() {
        Ok(here) => words.with_base(&here).to_string(),
        Err(_) => words.to_string(),
    }
}

fn export(wanted: &Wanted, declared: bool) -> Export {
    let read_only = wanted.read_only;
    let none = Export { nbd: None, vhost_user: None, ublk: None, read_only, declared };
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
    Ok(Wanted { place, read_only: export.read_only })
}
