//! The plan: changes that make a server match the declared devices.

use std::collections::HashSet;
use std::sync::Arc;

use freestone_control::protocol::RpcError;
use freestone_nbd::AllowList;
use freestone_spec::entries::with_article;
use freestone_spec::kinds::{Entry, Spec};
use freestone_spec::schema;
use serde_json::{Map, Value};
use tracing::warn;

use super::{ApplyOptions, Change};
use crate::declared::DeclaredDevice;
use crate::exports::DeviceExports;
use crate::exports::export_spec::{ExportAddress, ExportSet, ExportSpec};
use crate::service::Service;

/// Returns the addresses of a device's existing exports whose allow list changes, each with the new list.
pub(super) fn new_lists(
    service: &Service,
    device: &DeclaredDevice,
) -> Vec<(ExportAddress, Option<AllowList>)> {
    let name = &device.spec.name;
    let known = service.exports.declared(name);
    let of = |asked: &ExportSpec| {
        // Several exports with port 0 have equal addresses, so another declared export must not match.
        let is_other = |before: &ExportSpec| device.exports.contains(before) && before != asked;
        let of_place =
            |(before, _): &&(ExportSpec, ExportAddress)| before.address == asked.address && !is_other(before);
        let before = known.iter().find(|(before, _)| before == asked).or_else(|| known.iter().find(of_place));
        let place = before.map_or(&asked.address, |(_, at)| at);
        // An omitted allow list means no change, unless an earlier file had set a list.
        let is_said = asked.allow.is_some() || before.is_some_and(|(before, _)| before.allow.is_some());
        let is_new = service.exports.differs(name, place, asked.allow.as_ref());
        (is_said && is_new).then(|| (place.clone(), asked.allow.clone()))
    };
    device.exports.iter().filter_map(of).collect()
}

/// Computation of the changes that make a server match the declared devices. Fails if a change is impossible.
pub(super) struct Plan<'a> {
    pub(super) service: &'a Service,
    pub(super) devices: &'a [DeclaredDevice],
    pub(super) options: ApplyOptions,
}

impl Plan<'_> {
    /// Returns the changes in the order in which they are made.
    pub(super) fn changes(&self) -> Result<Vec<Change>, RpcError> {
        let mut changes = Vec::new();
        let removed = self.removals(&mut changes)?;
        for device in self.devices {
            for (place, list) in new_lists(self.service, device) {
                let is_planned =
                    |change: &Change| matches!(change, Change::Allow(_, at, _) if at.is_same(&place));
                if !changes.iter().any(is_planned) {
                    changes.push(Change::Allow(device.spec.name.clone(), place, list));
                }
            }
        }
        let mut there: HashSet<String> = HashSet::new();
        for device in self.devices {
            let name = &device.spec.name;
            match self.service.registry.find(name) {
                Some(entry) if entry.template.is_some() => {
                    refuse!(EEXIST, "{}{name}: is the fork of a connection to a template", device.at);
                }
                Some(entry) => self.change(device, &entry, &mut changes)?,
                None if self.service.records.is_pending(name) => {
                    warn!("{name}: not changed: its server has not answered yet");
                }
                None => {
                    let takes = device.spec.kind.exclusive_uses();
                    let takes = takes.iter().map(|takes| takes.name);
                    for below in device.spec.kind.parent_name().into_iter().chain(takes) {
                        let is_there = there.contains(below)
                            || (self.service.registry.find(below).is_some() && !removed.contains(below));
                        if !is_there {
                            refuse!(ENODEV, "{}{name}: {below}: there is no such device", device.at);
                        }
                    }
                    changes.push(Change::Create(Box::new(device.clone())));
                }
            }
            there.insert(name.clone());
        }
        Ok(changes)
    }

    /// Adds the removals to `changes`, dependent devices first. Returns the names of the devices to remove.
    fn removals(&self, changes: &mut Vec<Change>) -> Result<HashSet<String>, RpcError> {
        let service = self.service;
        let declared: HashSet<&str> = self.devices.iter().map(|device| device.spec.name.as_str()).collect();
        let known: HashSet<String> = service.exports.declared_devices().into_iter().collect();
        let all = service.registry.all();
        let goes = |entry: &&Arc<Entry>| {
            let name = entry.name();
            entry.template.is_none()
                && !declared.contains(name)
                && (self.options.prune || (known.contains(name) && !self.options.adds))
        };
        let removed: HashSet<String> = all.iter().filter(goes).map(|entry| entry.name().to_owned()).collect();
        for entry in all.iter().rev().filter(|entry| removed.contains(entry.name())) {
            let stays = |other: &&Arc<Entry>| {
                let needs = other.dependencies().iter().any(|needed| Arc::ptr_eq(needed, entry));
                needs && other.template.is_none() && !removed.contains(other.name())
            };
            if let Some(other) = all.iter().find(stays) {
                refuse!(EBUSY, "{}: cannot be removed: {} stands on it", entry.name(), other.name());
            }
            if !self.options.force {
                service.exports.check_idle(entry)?;
            }
            changes.push(Change::Remove(entry.name().to_owned()));
        }
        Ok(removed)
    }

    /// Returns the exports to publish when a withheld device is released.
    fn exports_when_released(
        &self,
        device: &DeclaredDevice,
        entry: &Arc<Entry>,
        is: &ExportSet,
    ) -> ExportSet {
        let home = self.service.is_for_server_addresses(device.spec.publish, entry);
        let stays =
            |wanted: &ExportSpec| !device.exports.iter().any(|other| other.address.is_same(&wanted.address));
        let by_hand =
            is.exports.iter().filter(|wanted| !wanted.declared && !self.options.prune && stays(wanted));
        let of_file = device.exports.iter().map(|asked| {
            let chosen = |is: &&ExportSpec| {
                is.read_only == asked.read_only && is.address.has_chosen_port_of(&asked.address)
            };
            let place = is.exports.iter().find(chosen).map_or(&asked.address, |is| &is.address);
            ExportSpec { address: place.clone(), ..asked.clone() }
        });
        ExportSet { at_server_addresses: home, exports: by_hand.cloned().chain(of_file).collect() }
    }

    /// Adds the changes that bring an existing device to its declared state.
    fn change(
        &self,
        device: &DeclaredDevice,
        entry: &Arc<Entry>,
        changes: &mut Vec<Change>,
    ) -> Result<(), RpcError> {
        let (service, name) = (self.service, entry.name());
        let attrs =
            differences(entry, &device.spec).map_err(|why| refusal!(EBUSY, "{}{name}: {why}", device.at))?;
        if !attrs.is_empty() {
            changes.push(Change::Set(name.to_owned(), attrs));
        }
        if service.exports.withheld(name).is_some() {
            let is = service.exports.read(name, DeviceExports::unpublished);
            // A file cannot release a withheld device, only change the exports to publish after the release.
            let export_set = self.exports_when_released(device, entry, &is);
            if !export_set.is_same(&is) {
                changes.push(Change::Withhold(name.to_owned(), export_set));
            }
            return Ok(());
        }
        let live = service.exports.specs(name);
        let known = service.exports.declared(name);
        // Exports that cannot be published yet are retried anyhow, unless their specification changes.
        let absent = service.exports.read(name, DeviceExports::unpublished);
        let is_asked = |is: &ExportSpec, asked: &ExportSpec| {
            let place =
                if is.address.has_chosen_port_of(&asked.address) { &is.address } else { &asked.address };
            let read_only = asked.read_only || entry.is_read_only();
            ExportSpec { address: place.clone(), read_only, declared: is.declared, ..asked.clone() } == *is
        };
        for export in &absent.exports {
            let is_other = |asked: &ExportSpec| asked.address.is_same(&export.address);
            let goes = export.declared || self.options.prune || device.exports.iter().any(is_other);
            if goes && !device.exports.iter().any(|asked| is_asked(export, asked)) {
                changes.push(Change::Unpublish(name.to_owned(), export.address.clone()));
            }
        }
        let is_shown = |wanted: &ExportSpec| {
            let read_only = wanted.read_only || entry.is_read_only();
            let at = |place: &ExportAddress| {
                live.iter().any(|is| is.address.is_same(place) && is.read_only == read_only)
            };
            at(&wanted.address)
                || known.iter().any(|(before, place)| before.has_same_address_and_mode(wanted) && at(place))
        };
        let is_wanted = |place: &ExportAddress| {
            let by = |wanted: &ExportSpec| {
                is_shown(wanted)
                    && (wanted.address.is_same(place)
                        || known.iter().any(|(before, at)| {
                            before.has_same_address_and_mode(wanted) && at.is_same(place)
                        }))
            };
            device.exports.iter().any(by)
        };
        for export in live.iter().filter(|export| !is_wanted(&export.address)) {
            // An export that becomes read-only or writable at the same address is unpublished first.
            let is_republished = device.exports.iter().any(|wanted| wanted.address.is_same(&export.address));
            if self.options.prune || is_republished || known.iter().any(|(_, at)| at.is_same(&export.address))
            {
                changes.push(Change::Unpublish(name.to_owned(), export.address.clone()));
            }
        }
        let home = service.exports.server_addresses();
        let at_home = home.iter().filter(|address| service.exports.is_at(name, address));
        let at_home: Vec<_> = at_home.cloned().collect();
        let belongs = service.is_for_server_addresses(device.spec.publish, entry);
        if belongs && at_home.len() < home.len() && !absent.at_server_addresses {
            changes.push(Change::PublishAtServer(name.to_owned()));
        } else if !belongs {
            let unpublish = |at| Change::Unpublish(name.to_owned(), ExportAddress::Nbd(at));
            changes.extend(at_home.into_iter().map(unpublish));
        }
        for wanted in device.exports.iter().filter(|wanted| is_shown(wanted)) {
            let is_there = |is: &&ExportSpec| {
                let by_file = |(before, at): &(ExportSpec, ExportAddress)| {
                    before.has_same_address_and_mode(wanted) && at.is_same(&is.address)
                };
                wanted.address.is_same(&is.address) || known.iter().any(by_file)
            };
            if let Some(is) = live.iter().find(is_there).filter(|is| is.limits != wanted.limits) {
                changes.push(Change::Limit(name.to_owned(), is.address.clone(), wanted.clone()));
            }
        }
        let is_absent = |wanted: &&ExportSpec| absent.exports.iter().any(|export| is_asked(export, wanted));
        let missing = device.exports.iter().filter(|wanted| !is_shown(wanted) && !is_absent(wanted));
        changes.extend(missing.map(|wanted| Change::Publish(name.to_owned(), wanted.clone())));
        Ok(())
    }
}

/// Returns the attributes to set so that the device matches the new specification `asked`.
///
/// # Errors
/// Returns the reason, to append to the device name, if a difference cannot be set at run time.
fn differences(entry: &Entry, asked: &Spec) -> Result<Map<String, Value>, String> {
    let now = entry.words.current(&entry.spec);
    let is = Spec::from_entries(now.clone()).map_err(|_| "was restored from a file".to_owned())?;
    let mut attrs = Map::new();
    if is.is_same(asked) {
        return Ok(attrs);
    }
    if now.kind != asked.words.kind {
        return Err(format!("is {} device; remove it first", with_article(&now.kind)));
    }
    let of = |pairs: &[(String, String)], key: &str| {
        pairs.iter().find(|(known, _)| known == key).map(|(_, value)| value.clone())
    };
    let keys = now.pairs.iter().chain(&asked.words.pairs).map(|(key, _)| key.as_str());
    let keys: HashSet<&str> = keys.filter(|key| *key != "publish").collect();
    for key in keys {
        let wanted = of(&asked.words.pairs, key);
        let mut probe = now.clone();
        match &wanted {
            Some(value) => probe.put(key, value),
            None => probe.pairs.retain(|(known, _)| known != key),
        }
        // Different texts can mean the same value, such as 1G and 1024M.
        if Spec::from_entries(probe).is_ok_and(|probe| probe.is_same(&is)) {
            continue;
        }
        let is = of(&now.pairs, key).unwrap_or_else(|| "not set".into());
        let without = match schema::change(&now.kind, key) {
            schema::Change::Set => None,
            schema::Change::Or(value) => Some(value.to_owned()),
            schema::Change::Fixed | schema::Change::Steps => {
                return Err(format!("{key}: is {is} and cannot be changed; remove the device first"));
            }
        };
        let value = wanted.or(without);
        let value = value.ok_or_else(|| format!("{key}: is {is}, and the file does not set it"))?;
        attrs.insert(if key == "size" { "disksize" } else { key }.to_owned(), value.into());
    }
    Ok(attrs)
}
