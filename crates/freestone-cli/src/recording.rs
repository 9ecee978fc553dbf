//! How verbs change what is there after the next start.
//!
//! A verb begins a [`Recording`] of the names that it has claimed, before it does anything. When all is
//! done it commits: what is then to be said of these names is asked of the devices and exports
//! themselves, so no verb says it in words of its own.

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

/// A change of devices that has begun.
pub struct Recording<'a> {
    service: &'a Service,
    names: Vec<String>,
    /// Devices that could not be made again are forgotten, too.
    forgets_missing: bool,
    change: Option<(&'a State, Change<'a>)>,
    /// Dropped after the change.
    _entered: Option<Entered<'a>>,
}

impl<'a> Recording<'a> {
    /// A verb is about to change these devices, which it has claimed.
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

    /// All is done. Durable when this returns.
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
                // It is as little there as before.
                (None, Some(_)) if !self.forgets_missing && service.records.why_missing(name).is_some() => {}
                (None, Some(_)) => {
                    found.push(name);
                    change.gone(name);
                }
                (None, None) => {}
            }
        }
        // After the look at the exports: where it is not over yet, none of them had gone then.
        if service.records.is_over() {
            return Err(too_late(&names.join(", ")));
        }
        change.commit().map_err(|error| refused(&error))?;
        // Not before: a save must not go over the content of a device that stays in the state.
        for name in found {
            service.records.found(name);
            if self.forgets_missing {
                service.registry.ahead.forget(name);
                service.exports.defaults.release(name);
            }
        }
        Ok(())
    }

    /// Has [`commit`](Self::commit) also forget devices that could not be made again.
    pub fn forget_missing(&mut self) {
        self.forgets_missing = true;
    }
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
    // What cannot be shown now stays.
    let absent = service.exports.absent.seen(name);
    let exports = service.exports.wanted(name).into_iter().map(with).chain(absent.exports).collect();
    Seen { home: absent.home || service.exports.is_at_home(name), exports }
}

/// What is to be known of a device after the next start.
fn device(service: &Service, entry: &Entry, seen: &Seen) -> Device {
    let name = entry.name();
    let left_out = mutants::on(Mutant::ExportsForgotten);
    let exports = seen.exports.iter().filter(|_| !left_out);
    let mut default_at = service.exports.defaults.of(name);
    let live = service.exports.nbd.exports_named(name).into_iter().filter(|export| export.default);
    default_at.extend(live.map(|export| export.address));
    let mut default_at: Vec<String> = default_at.iter().map(address_text).collect();
    default_at.sort_unstable();
    let withheld = service.withheld.has(name);
    // Of a withheld device the base that it was last shown with, so that the next start says why.
    let shown_with = service.records.state().filter(|_| withheld).and_then(|state| state.find(name));
    let base = match shown_with {
        Some(device) => device.base,
        None => base_identities(service, &entry.spec).into_iter().map(|(_, identity)| identity).collect(),
    };
    // A version that understands these may serve the state again.
    let unread = service.exports.absent.unread(name).into_iter().map(|export| export.record);
    Device {
        name: name.to_owned(),
        uuid: entry.identity.uuid.simple().to_string(),
        generation: entry.identity.generation,
        withheld,
        // It goes on.
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
pub fn base_identities(service: &Service, spec: &Spec) -> Vec<(PathBuf, String)> {
    let base = spec.kind.below().filter(|_| spec.keep).and_then(|base| service.registry.find(base));
    base.map(|base| base.kind.file_identities()).unwrap_or_default()
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

/// What a server begins with, before anybody sees it: each with where it is to be seen.
pub fn put<'a>(service: &Service, devices: impl Iterator<Item = (&'a Entry, Seen)>) -> Result<(), Fault> {
    let Some(state) = service.records.state() else { return Ok(()) };
    let now = devices.map(|(entry, seen)| device(service, entry, &seen));
    let changed: Vec<Device> = now.filter(|now| state.find(&now.name).as_ref() != Some(now)).collect();
    service.records.put_all(changed)
}

/// Whether a device is otherwise than what is kept.
pub fn differs(service: &Service, entry: &Entry) -> bool {
    let known = |state: &State| state.find(entry.name());
    let now = || device(service, entry, &seen(service, entry.name()));
    service.records.state().is_some_and(|state| known(state) != Some(now()))
}
