//! Records the changes of verbs in the state, for the next start.
//!
//! A verb begins a [`Recording`] of the names that it has claimed, before its first change. When it is done,
//! it commits: the recording reads the current devices and exports with these names and writes their records.
//! No verb writes records itself.

use std::env;
use std::path::PathBuf;

use freestone::mutants::{self, Mutant};
use freestone_spec::kinds::{Entry, Spec};
use freestone_state::{Change, Device, State};

use crate::claims::Claim;
use crate::control::protocol::Fault;
use crate::paths::address_text;
use crate::places::{Place, Seen, Wanted};
use crate::records::{Entered, export, refused, too_late};
use crate::service::Service;

/// A pending change of the state. Dropping it without [`commit`](Self::commit) records nothing.
pub struct Recording<'a> {
    service: &'a Service,
    names: Vec<String>,
    /// Also remove the records of missing devices.
    forgets_missing: bool,
    change: Option<(&'a State, Change<'a>)>,
    /// Guard that delays the shutdown; dropped after the change.
    _entered: Option<Entered<'a>>,
}

impl<'a> Recording<'a> {
    /// Begins a change of these devices, which the verb has claimed. Does nothing without a state.
    pub fn begin(service: &'a Service, _: &Claim<'_>, verb: &str, names: &[&str]) -> Result<Self, Fault> {
        let Some(state) = service.records.state() else {
            return Ok(Self {
                service,
                names: Vec::new(),
                forgets_missing: false,
                change: None,
                _entered: None,
            });
        };
        let entered = service.records.enter(names)?;
        let change = state.begin(verb, names).map_err(|error| refused(&error))?;
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let change = Some((state, change));
        Ok(Self { service, names, forgets_missing: false, change, _entered: Some(entered) })
    }

    /// Writes the records of the changed devices. They are durable on return.
    pub fn commit(mut self) -> Result<(), Fault> {
        let Some((state, mut change)) = self.change.take() else { return Ok(()) };
        let (service, names) = (self.service, &self.names);
        let mut found = Vec::new();
        for name in names {
            let old = state.find(name);
            match (service.registry.find(name).filter(|entry| entry.template.is_none()), old) {
                (Some(entry), old) => {
                    found.push(name);
                    let now = device(service, &entry, &seen(service, name));
                    if old.as_ref() != Some(&now) {
                        change.put(now);
                    }
                }
                // The device was missing before the verb, and still is.
                (None, Some(_)) if !self.forgets_missing && service.records.why_missing(name).is_some() => {}
                (None, Some(_)) => {
                    found.push(name);
                    change.gone(name);
                }
                (None, None) => {}
            }
        }
        // Checked after the exports were read: a shutdown before that may have removed some of them.
        if service.records.is_over() {
            return Err(too_late(&names.join(", ")));
        }
        change.commit().map_err(|error| refused(&error))?;
        // Only after the commit: until then a save must not overwrite the content of a device in the state.
        for name in found {
            service.records.found(name);
            if self.forgets_missing {
                service.registry.ahead.forget(name);
                service.exports.defaults.release(name);
            }
        }
        Ok(())
    }

    /// Makes [`commit`](Self::commit) also remove the records of missing devices.
    pub fn forget_missing(&mut self) {
        self.forgets_missing = true;
    }
}

/// Returns the exports of a device. For a withheld device, returns the exports that it gets when released.
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
    // Absent exports remain in the state.
    let absent = service.exports.absent.seen(name);
    let exports = service.exports.wanted(name).into_iter().map(with).chain(absent.exports).collect();
    Seen { home: absent.home || service.exports.is_at_home(name), exports }
}

/// Returns the record of a device.
fn device(service: &Service, entry: &Entry, seen: &Seen) -> Device {
    let name = entry.name();
    let left_out = mutants::on(Mutant::ExportsForgotten);
    let exports = seen.exports.iter().filter(|_| !left_out);
    let mut default_at = service.exports.defaults.of(name);
    let live = service.exports.nbd.exports_named(name).into_iter().filter(|export| export.default);
    default_at.extend(live.map(|export| export.address));
    let mut default_at: Vec<String> = default_at.iter().map(address_text).collect();
    default_at.sort_unstable();
    // A withheld device keeps the base with which it was last published, so that the next start can report
    // the reason.
    let shown_with =
        service.records.state().filter(|_| service.withheld.has(name)).and_then(|state| state.find(name));
    let base = match shown_with {
        Some(device) => device.base,
        None => base_identities(service, &entry.spec, entry.is_kept())
            .into_iter()
            .map(|(_, identity)| identity)
            .collect(),
    };
    // Records that this version cannot parse are kept for a version that can.
    let unread = service.exports.absent.unread(name).into_iter().map(|export| export.record);
    Device {
        name: name.to_owned(),
        uuid: entry.identity.uuid.simple().to_string(),
        generation: entry.identity.generation,
        withheld: service.withheld.has_lost(name),
        // The content changes from now on.
        saved: None,
        base,
        words: words(entry),
        declared: service.declarations.has(name),
        home: seen.home,
        default_at,
        exports: exports.map(|(wanted, declared)| export(wanted, *declared)).chain(unread).collect(),
    }
}

/// Returns the files of the base that kept content lies over, each with its identity. The content of
/// a device that is not kept ends with its server, so its base may change.
pub fn base_identities(service: &Service, spec: &Spec, keep: bool) -> Vec<(PathBuf, String)> {
    let base = spec.kind.below().filter(|_| keep).and_then(|base| service.registry.find(base));
    base.map(|base| base.kind.file_identities()).unwrap_or_default()
}

/// Returns the specification that creates the device again, independent of the working directory.
fn words(entry: &Entry) -> String {
    let mut words = entry.words.now(&entry.spec);
    // `force` applied to the creation only. `publish` is recorded as exports.
    words.pairs.retain(|(key, _)| key != "force" && key != "publish");
    match env::current_dir() {
        Ok(here) => words.with_base(&here).to_string(),
        Err(_) => words.to_string(),
    }
}

/// Records the devices of a starting server with their exports, before any client can connect.
pub fn put<'a>(service: &Service, devices: impl Iterator<Item = (&'a Entry, Seen)>) -> Result<(), Fault> {
    let Some(state) = service.records.state() else { return Ok(()) };
    let now = devices.map(|(entry, seen)| device(service, entry, &seen));
    let changed: Vec<Device> = now.filter(|now| state.find(&now.name).as_ref() != Some(now)).collect();
    service.records.put_all(changed)
}

/// Returns true if a device differs from its record.
pub fn differs(service: &Service, entry: &Entry) -> bool {
    let known = |state: &State| state.find(entry.name());
    let now = || device(service, entry, &seen(service, entry.name()));
    service.records.state().is_some_and(|state| known(state) != Some(now()))
}
