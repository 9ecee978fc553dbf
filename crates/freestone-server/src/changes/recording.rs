//! Recording of changes in the state directory, from which the next start restores devices and exports.
//!
//! A verb begins a [`Recording`] of the names that it has claimed, before its first change. When it is done,
//! it commits: the recording reads the current devices and exports with these names and writes their records.
//! No verb writes records itself.

use std::env;
use std::path::PathBuf;
use std::sync::Arc;

use freestone::mutants::{self, Mutant};
use freestone_control::protocol::RpcError;
use freestone_spec::kinds::{Entry, Spec};
use freestone_state::{Change, Device, State};

use crate::devices::claims::Claim;
use crate::exports::Withheld;
use crate::persistence::recorded;
use crate::persistence::records::{PendingChange, export_record, shutdown_error, state_error};
use crate::service::Service;
use crate::settings::paths::address_text;

/// A pending change of the state directory. Dropping it without [`commit`](Self::commit) records nothing.
pub struct Recording<'a> {
    service: &'a Service,
    names: Vec<String>,
    /// True if [`commit`](Self::commit) also removes the records of missing devices (which could not be
    /// created again).
    removes_missing_records: bool,
    change: Option<(&'a State, Change<'a>)>,
    /// Guard that delays the shutdown of the server; dropped after `change`.
    _pending: Option<PendingChange<'a>>,
}

impl<'a> Recording<'a> {
    /// Begins a change of these devices, which the verb has claimed. Without a state directory nothing is
    /// recorded.
    pub fn begin(service: &'a Service, _: &Claim<'_>, verb: &str, names: &[&str]) -> Result<Self, RpcError> {
        freestone_core::trail::step!();
        let Some(state) = service.records.state() else {
            return Ok(Self {
                service,
                names: Vec::new(),
                removes_missing_records: false,
                change: None,
                _pending: None,
            });
        };
        let pending = service.records.begin_change(names)?;
        let change = state.begin(verb, names).map_err(|error| state_error(&error))?;
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let change = Some((state, change));
        Ok(Self { service, names, removes_missing_records: false, change, _pending: Some(pending) })
    }

    /// Writes the records of the changed devices, which are durable on return.
    pub fn commit(mut self) -> Result<(), RpcError> {
        freestone_core::trail::step!();
        let Some((state, mut change)) = self.change.take() else { return Ok(()) };
        let (service, names) = (self.service, &self.names);
        let mut found = Vec::new();
        for name in names {
            let old = state.find(name);
            // A missing device is removed or replaced. Afterwards no server would know its block device of a killed
            // server.
            if let Some(blocks) = service.exports.block_recovery.get()
                && let Some(identity) = old.as_ref().and_then(recorded::identity)
                && service.registry.find(name).map_or(self.removes_missing_records, |entry| {
                    entry.template.is_none() && entry.identity.uuid != identity.uuid
                })
            {
                blocks.remove(name, identity, false)?;
            }
            match (service.registry.find(name).filter(|entry| entry.template.is_none()), old) {
                (Some(entry), old) => {
                    found.push(name);
                    let now = device(service, &entry);
                    if old.as_ref() != Some(&now) {
                        change.put(now);
                    }
                }
                // The device was missing before the verb, and still is, so its record remains.
                (None, Some(_))
                    if !self.removes_missing_records && service.records.why_missing(name).is_some() => {}
                (None, Some(_)) => {
                    found.push(name);
                    change.remove(name);
                }
                (None, None) => {}
            }
        }
        // Checked after the exports were read: a shutdown that began earlier may have removed exports.
        if service.records.is_closed() {
            return Err(shutdown_error(&names.join(", ")));
        }
        change.commit().map_err(|error| state_error(&error))?;
        // Only after the commit: until then a save must not overwrite the content of a device in the state.
        for name in found {
            service.records.remove_missing(name);
            if self.removes_missing_records {
                service.registry.parallel_open.forget(name);
                service.exports.release_defaults(name);
            }
        }
        Ok(())
    }

    /// Makes [`commit`](Self::commit) also remove the records of missing devices.
    pub fn forget_missing(&mut self) {
        self.removes_missing_records = true;
    }
}

/// Returns the state record of a device, with identity, specification and exports.
fn device(service: &Service, entry: &Entry) -> Device {
    let name = entry.name();
    let export_set = service.exports.export_set(name);
    let left_out = mutants::on(Mutant::ExportsForgotten);
    let exports = export_set.exports.iter().filter(|_| !left_out);
    let mut default_at: Vec<String> =
        service.exports.default_addresses(name).iter().map(address_text).collect();
    default_at.sort_unstable();
    let (withheld, declared, unparsed) =
        service.exports.read(name, |device| (device.withheld, device.is_declared, device.unparsed.clone()));
    // The record of a withheld device keeps the base with which it was last published, so that the next start
    // can report the reason.
    let shown_with =
        service.records.state().filter(|_| withheld.is_some()).and_then(|state| state.find(name));
    let base = match shown_with {
        Some(device) => device.base,
        None => base_identities(service, &entry.spec, entry.is_kept())
            .into_iter()
            .map(|(_, identity)| identity)
            .collect(),
    };
    // Records that this version cannot parse are kept for a version that can.
    let unparsed = unparsed.into_iter().map(|export| export.record);
    Device {
        name: name.to_owned(),
        uuid: entry.identity.uuid.simple().to_string(),
        generation: entry.identity.generation,
        withheld: withheld == Some(Withheld::LostContent),
        // No save has the content from now on, because clients can change it.
        saved: None,
        base,
        words: words(entry),
        declared,
        home: export_set.at_server_addresses,
        default_at,
        exports: exports.map(export_record).chain(unparsed).collect(),
    }
}

/// Returns the files of a device's base, each with its identity, if the content of the device is kept over
/// restarts (`keep`) or recoverable. Returns an empty list otherwise: the content ends with the server, so its base
/// may change.
pub fn base_identities(service: &Service, spec: &Spec, keep: bool) -> Vec<(PathBuf, String)> {
    let survives = keep || service.recovery.get().is_some();
    let base = spec.kind.parent_name().filter(|_| survives).and_then(|base| service.registry.find(base));
    base.map(|base| base.kind.file_identities()).unwrap_or_default()
}

/// Returns the specification that creates the device again, independent of the working directory.
fn words(entry: &Entry) -> String {
    let mut words = entry.words.current(&entry.spec);
    // The key `force` applied to the creation only. The key `publish` is recorded as exports.
    words.pairs.retain(|(key, _)| key != "force" && key != "publish");
    match env::current_dir() {
        Ok(here) => words.with_base(&here).to_string(),
        Err(_) => words.to_string(),
    }
}

/// Records the devices of a starting server with their exports in the state, before any client can connect.
pub fn record_devices(service: &Service, devices: &[Arc<Entry>]) -> Result<(), RpcError> {
    let Some(state) = service.records.state() else { return Ok(()) };
    let now = devices.iter().map(|entry| device(service, entry));
    let changed: Vec<Device> = now.filter(|now| state.find(&now.name).as_ref() != Some(now)).collect();
    service.records.put_all(changed)
}

/// Returns true if a device differs from its state record. Returns false without a state directory.
pub fn has_changed(service: &Service, entry: &Entry) -> bool {
    let known = |state: &State| state.find(entry.name());
    service.records.state().is_some_and(|state| known(state) != Some(device(service, entry)))
}
