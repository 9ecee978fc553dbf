//! Applies a configuration file to a running server.
//!
//! A plan lists all changes before the first one is made, and fails if one of them is impossible. Devices and exports
//! that no file has declared remain, unless `prune` is set.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use freestone_nbd::{Address, AllowList};
use freestone_spec::config::FileConfig;
use freestone_spec::entries::with_article;
use freestone_spec::kinds::{Entry, Spec};
use freestone_spec::refusal::Errno;
use freestone_state::State;
use serde_json::{Map, Value};
use tracing::warn;

use crate::allow;
use crate::claims::Claim;
use crate::control::protocol::RpcError;
use crate::declared::{self, DeclaredDevice};
use crate::export_spec::{ExportAddress, ExportSet, ExportSpec};
use crate::handshake;
use crate::paths::parse_address;
use crate::recording::Recording;
use crate::saves;
use crate::service::Service;

/// Device keys that can be changed at run time, each with the value that is set when the file no longer contains the
/// key. `None` means that the key must not disappear from the file.
const SETTABLE: [(&str, Option<&str>); 19] = [
    ("disksize", None),
    ("size", None),
    ("mem_limit", Some("none")),
    ("mem_min", Some("0")),
    ("full", None),
    ("full_timeout", None),
    ("mem_warn_threshold", None),
    ("writeback_limit", None),
    ("writeback_limit_enable", Some("0")),
    ("writeback_batch_size", None),
    ("faults", Some("none")),
    ("seed", None),
    ("iops", Some("0")),
    ("bps", Some("0")),
    ("iops_burst", Some("0")),
    ("bps_burst", Some("0")),
    ("max_clients", Some("0")),
    ("keep", Some("no")),
    ("on_data_loss", Some("withhold")),
];

/// Options for applying a configuration file.
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
#[derive(Debug, Clone, Copy)]
pub struct ApplyOptions {
    /// Also remove devices and exports that no file declares.
    pub prune: bool,
    /// Remove and unpublish even if clients are connected; their connections are closed.
    pub force: bool,
    /// Return the planned changes without making them.
    pub check: bool,
    /// Keep devices that only earlier files declared, because the source is a command line, not a new file.
    pub adds: bool,
}

/// A planned change of a device, an export or an allow list.
#[derive(Debug)]
enum Change {
    Remove(String),
    Unpublish(String, ExportAddress),
    Set(String, Map<String, Value>),
    Create(Box<DeclaredDevice>),
    PublishAtServer(String),
    AllowAtServer(AllowList),
    Allow(String, ExportAddress, Option<AllowList>),
    Publish(String, ExportSpec),
    /// Sets the limits of the export at this address to those of the specification.
    Limit(String, ExportAddress, ExportSpec),
    Withhold(String, ExportSet),
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Remove(name) => write!(f, "remove {name}"),
            Self::Unpublish(name, place) => write!(f, "unpublish {name} from {place}"),
            Self::Set(name, attrs) => {
                write!(f, "set {name}")?;
                attrs
                    .iter()
                    .try_for_each(|(attr, value)| write!(f, " {attr}={}", value.as_str().unwrap_or_default()))
            }
            Self::Create(declared) => write!(f, "create {}", declared.spec.words),
            Self::PublishAtServer(name) => write!(f, "publish {name}"),
            Self::AllowAtServer(list) => write!(f, "allow {list} at the addresses of the server"),
            Self::Allow(_, place, list) => write!(f, "allow {} at {place}", allow::shown(list.as_ref())),
            Self::Publish(name, wanted) => {
                let how = if wanted.read_only { ", read-only" } else { "" };
                write!(f, "publish {name} at {}{how}", wanted.address)?;
                wanted.limits.words().try_for_each(|(key, text)| write!(f, ", {key}={text}"))
            }
            Self::Limit(name, place, wanted) => {
                write!(f, "limit {name} at {place}")?;
                if wanted.limits.is_unlimited() {
                    return write!(f, ": no limit");
                }
                wanted.limits.words().try_for_each(|(key, text)| write!(f, ", {key}={text}"))
            }
            Self::Withhold(name, export_set) => {
                write!(f, "publish {name}, once it is no longer withheld")?;
                export_set.exports.iter().try_for_each(|(wanted, _)| write!(f, ", at {}", wanted.address))
            }
        }
    }
}

/// Applies the configuration file at `path`. Returns one line per change, made unless `options.check` is set.
pub fn apply(service: &Service, path: &Path, options: ApplyOptions) -> Result<Vec<String>, RpcError> {
    let invalid = |error: anyhow::Error| RpcError::failed(Errno::EINVAL, format!("{error:#}"));
    let file = declared::read(path).map_err(invalid)?;
    let mut devices = declared::devices(&file, path).map_err(|why| RpcError::invalid(why.0))?;
    if file.ublk || service.as_block_devices.load(Ordering::SeqCst) {
        declared::as_block_devices(&mut devices);
    }
    check_server(service, &file, path)?;
    let home = file.allow.as_deref().map(|words| home_list(service, words)).transpose();
    let home = home.map_err(|why| RpcError::invalid(format!("{}: allow: {why}", path.display())))?;
    if let Some(list) = &home
        && let Some(is) = service.exports.fixed_server_allow_list()
        && is != *list
    {
        let why = format!("{}: allow: --allow of the server ({is}) takes precedence", path.display());
        return Err(RpcError::failed(Errno::EBUSY, why));
    }
    apply_all(service, &devices, home, options)
}

/// Parses the allow list of the server's addresses, and checks it against each of them.
fn home_list(service: &Service, words: &[String]) -> Result<AllowList, String> {
    let list = allow::parse(words)?;
    service.exports.server_addresses().iter().try_for_each(|address| allow::check(&list, address))?;
    Ok(list)
}

/// Applies `devices` without reading a file, for the start of a server. Returns the same as [`apply`].
pub fn apply_devices(
    service: &Service,
    devices: &[DeclaredDevice],
    options: ApplyOptions,
) -> Result<Vec<String>, RpcError> {
    apply_all(service, devices, None, options)
}

/// Applies `devices`, and sets the allow list of the server's addresses to `home` unless it is `None`.
fn apply_all(
    service: &Service,
    devices: &[DeclaredDevice],
    home: Option<AllowList>,
    options: ApplyOptions,
) -> Result<Vec<String>, RpcError> {
    let known = service.declarations.names();
    let all = if options.prune { service.registry.all() } else { Vec::new() };
    let mut own: HashSet<&str> = devices.iter().map(|device| device.spec.name.as_str()).collect();
    own.extend(known.iter().map(String::as_str));
    own.extend(all.iter().filter(|entry| entry.template.is_none()).map(|entry| entry.name()));
    let shared: Vec<&str> = devices.iter().filter_map(|device| device.spec.kind.parent_name()).collect();
    own.extend(devices.iter().flat_map(|device| device.spec.kind.claimed_devices()));
    let neighbors: Vec<String> =
        devices.iter().flat_map(|device| neighbors_of_new_lists(service, device)).collect();
    own.extend(neighbors.iter().map(String::as_str));
    let own: Vec<&str> = own.into_iter().collect();
    let claim = service.claim_over_all("apply", &own, &shared)?;
    let mut changes = Plan { service, devices, options }.changes()?;
    if let Some(list) = home.filter(|list| service.exports.server_allow_list().as_ref() != Some(list)) {
        changes.insert(0, Change::AllowAtServer(list));
    }
    if options.check {
        return Ok(changes.iter().map(ToString::to_string).collect());
    }
    let recording = Recording::begin(service, &claim, "apply", &own)?;
    let (mut done, count) = (Vec::new(), changes.len());
    for change in changes {
        let text = change.to_string();
        if let Err(fault) = apply_change(service, &claim, change, options) {
            let message = format!("{}; {} of {count} changes were made", fault.message, done.len());
            // The changes already made are not rolled back, so they are recorded.
            recording.commit()?;
            return Err(RpcError { message, ..fault });
        }
        done.push(text);
    }
    for device in devices.iter().filter(|device| device.is_of_file()) {
        service.declarations.declare(&device.spec.name);
    }
    recording.commit()?;
    Ok(done)
}

/// Returns the addresses of a device's existing exports whose allow list changes, each with the new list.
fn new_lists(service: &Service, device: &DeclaredDevice) -> Vec<(ExportAddress, Option<AllowList>)> {
    let name = &device.spec.name;
    let known = service.declarations.of(name);
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

/// Returns the names of all exports at addresses whose allow list changes. A list applies to a whole address.
fn neighbors_of_new_lists(service: &Service, device: &DeclaredDevice) -> Vec<String> {
    let addresses = new_lists(service, device).into_iter().filter_map(|(place, _)| match place {
        ExportAddress::Nbd(address) => Some(address),
        ExportAddress::VhostUser(_) | ExportAddress::Ublk(_) => None,
    });
    let all = addresses.flat_map(|address| service.exports.nbd.exports_at(&address));
    all.map(|export| export.name).collect()
}

/// Fails if the file differs from a setting of the whole server that can only be changed by a restart.
fn check_server(service: &Service, file: &FileConfig, path: &Path) -> Result<(), RpcError> {
    let differs = |key: &str, is: String| {
        let why =
            format!("{}: {key}: the server uses {is}; restart the server to change this", path.display());
        Err(RpcError::failed(Errno::EBUSY, why))
    };
    let same = |key: &str, said: &str, is: Option<&String>| {
        let is = is.map_or("none", String::as_str);
        if is == said { Ok(()) } else { differs(key, is.to_owned()) }
    };
    let mut home = service.exports.server_addresses();
    home.retain(|address| *address != Address::Stdin);
    let is_home = |text: &String| match parse_address(text, Some(&file.base)) {
        // Port 0 matches the port that the system chose when the server started.
        Ok(Address::Tcp { host, port: 0, .. }) => {
            home.iter().any(|at| matches!(at, Address::Tcp { host: other, .. } if *other == host))
        }
        Ok(address) => home.contains(&address),
        Err(_) => false,
    };
    let is_same = file.nbd.len() == home.len() && file.nbd.iter().all(is_home);
    if !file.nbd.is_empty() && !is_same {
        let is: Vec<_> = home.iter().map(ToString::to_string).collect();
        return differs("nbd", is.join(", "));
    }
    if let (Some(control), Some(is)) = (&file.control, service.control.get())
        && std::path::absolute(file.base.join(control)).ok().as_ref() != Some(is)
    {
        return differs("control", is.display().to_string());
    }
    if let Some(control) = &file.control_read_only {
        let is = service.control_read_only.get();
        if std::path::absolute(file.base.join(control)).ok().as_ref() != is {
            let is = is.map_or_else(|| "none".to_owned(), |is| is.display().to_string());
            return differs("control_read_only", is);
        }
    }
    if let Some(asked) = &file.state {
        let is = service.records.state().map(State::dir);
        if std::path::absolute(file.base.join(asked)).ok().as_deref() != is {
            return differs("state", is.map_or_else(|| "none".into(), |dir| dir.display().to_string()));
        }
    }
    let (now, asked) = (service.saves.keys(), saves::SaveSchedule::keys_of(file));
    for (key, value) in asked {
        same(key, &value, now.iter().find(|(known, _)| *known == key).map(|(_, is)| is))?;
    }
    let said = [&file.sockets, &file.control_socket, &file.control_read_only_socket];
    for ((prefix, is), said) in service.access.each().into_iter().zip(said) {
        let now = is.words.keys(prefix);
        for (key, value) in said.keys(prefix) {
            same(&key, &value, now.iter().find(|(known, _)| *known == key).map(|(_, is)| is))?;
        }
    }
    let (now, base) = (&service.exports.tls.words, &file.base);
    for ((key, value), (_, is)) in file.tls.clone().with_base(base).texts().into_iter().zip(now.texts()) {
        if let Some(value) = value {
            same(key, &value, is.as_ref())?;
        }
    }
    let limits = &service.limits;
    if file.max_connections.is_some_and(|most| most as usize != limits.max_connections) {
        return differs("max_connections", limits.max_connections.to_string());
    }
    if let Some((key, is)) = handshake::differs(file, limits) {
        return differs(key, is);
    }
    if file.max_memory_in_flight.is_some_and(|most| most != limits.max_memory_in_flight) {
        return differs("max_memory_in_flight", freestone_spec::size::exact(limits.max_memory_in_flight));
    }
    Ok(())
}

/// Computation of the changes that make a server match the declared devices. Fails if a change is impossible.
struct Plan<'a> {
    service: &'a Service,
    devices: &'a [DeclaredDevice],
    options: ApplyOptions,
}

impl Plan<'_> {
    fn changes(&self) -> Result<Vec<Change>, RpcError> {
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
                    let why = "is the fork of a connection to a template";
                    return Err(RpcError::failed(Errno::EEXIST, format!("{}{name}: {why}", device.at)));
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
                            let why = format!("{}{name}: {below}: there is no such device", device.at);
                            return Err(RpcError::failed(Errno::ENODEV, why));
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
        let known: HashSet<String> = service.declarations.names().into_iter().collect();
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
                let why = format!("{}: cannot be removed: {} stands on it", entry.name(), other.name());
                return Err(RpcError::failed(Errno::EBUSY, why));
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
            is.exports.iter().filter(|(wanted, declared)| !declared && !self.options.prune && stays(wanted));
        let of_file = device.exports.iter().map(|asked| {
            let chosen = |(is, _): &&(ExportSpec, bool)| {
                is.read_only == asked.read_only && is.address.has_chosen_port_of(&asked.address)
            };
            let place = is.exports.iter().find(chosen).map_or(&asked.address, |(is, _)| &is.address);
            (ExportSpec { address: place.clone(), ..asked.clone() }, device.is_of_file())
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
        let attrs = differences(entry, &device.spec)
            .map_err(|why| RpcError::failed(Errno::EBUSY, format!("{}{name}: {why}", device.at)))?;
        if !attrs.is_empty() {
            changes.push(Change::Set(name.to_owned(), attrs));
        }
        if let Some(is) = service.withheld.of(name) {
            // A file cannot release a withheld device, only change the exports to publish after the release.
            let export_set = self.exports_when_released(device, entry, &is);
            if !export_set.is_same(&is) {
                changes.push(Change::Withhold(name.to_owned(), export_set));
            }
            return Ok(());
        }
        let live = service.exports.specs(name);
        let known = service.declarations.of(name);
        // Exports that cannot be published yet are retried anyhow, unless their specification changes.
        let absent = service.exports.unpublished.export_set(name);
        let is_asked = |is: &ExportSpec, asked: &ExportSpec| {
            let place =
                if is.address.has_chosen_port_of(&asked.address) { &is.address } else { &asked.address };
            let read_only = asked.read_only || entry.is_read_only();
            ExportSpec { address: place.clone(), read_only, ..asked.clone() } == *is
        };
        for (export, declared) in &absent.exports {
            let is_other = |asked: &ExportSpec| asked.address.is_same(&export.address);
            let goes = *declared || self.options.prune || device.exports.iter().any(is_other);
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
        let is_absent =
            |wanted: &&ExportSpec| absent.exports.iter().any(|(export, _)| is_asked(export, wanted));
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
        let settable = SETTABLE.iter().find(|(settable, _)| *settable == key);
        let is = of(&now.pairs, key).unwrap_or_else(|| "not set".into());
        let Some((_, without)) = settable else {
            return Err(format!("{key}: is {is} and cannot be changed; remove the device first"));
        };
        let value = wanted.or_else(|| without.map(str::to_owned));
        let value = value.ok_or_else(|| format!("{key}: is {is}, and the file does not set it"))?;
        attrs.insert(if key == "size" { "disksize" } else { key }.to_owned(), value.into());
    }
    Ok(attrs)
}

fn apply_change(
    service: &Service,
    claim: &Claim<'_>,
    change: Change,
    options: ApplyOptions,
) -> Result<(), RpcError> {
    let (exports, declarations) = (&service.exports, &service.declarations);
    match change {
        Change::Remove(name) => {
            service.remove(claim, &service.find(&name)?, options.force)?;
        }
        Change::Unpublish(name, place) => {
            exports.unpublish_from(claim, &*service.find(&name)?, &place, options.force)?;
            declarations.forget_export(&name, &place);
        }
        Change::Set(name, attrs) => service.set(&service.find(&name)?, &attrs)?,
        Change::Create(device) => {
            let is_of_file = device.is_of_file();
            let DeclaredDevice { spec, exports: wanted, .. } = *device;
            let (name, publish) = (spec.name.clone(), spec.publish);
            let entry = service.create(claim, spec, false)?;
            if is_of_file {
                declarations.declare(&name);
            }
            entry.kind.begin_merge(&entry, &service.registry)?;
            if service.is_for_server_addresses(publish, &entry) {
                exports.publish_at_server_addresses(claim, &entry)?;
            }
            for wanted in &wanted {
                let shown = exports.publish_at(claim, &entry, wanted)?;
                if is_of_file {
                    declarations.declare_export(&name, wanted, &shown);
                }
            }
        }
        Change::Withhold(name, export_set) => service.withheld.set_exports(&name, export_set),
        Change::AllowAtServer(list) => exports.set_server_allow_list(&list),
        Change::Allow(name, place, list) => {
            exports.set_allow(&name, &place, list.as_ref());
            for name in declarations.names() {
                declarations.allow(&name, &place, list.as_ref());
            }
        }
        Change::Limit(name, place, wanted) => {
            let limits = wanted.limits;
            let at = ExportSpec { address: place, ..wanted };
            exports.limit_at(claim, &*service.find(&name)?, &at, limits)?;
            declarations.limit_export(&name, &at.address, limits);
        }
        Change::PublishAtServer(name) => exports.publish_at_server_addresses(claim, &service.find(&name)?)?,
        Change::Publish(name, wanted) => {
            let shown = exports.publish_at(claim, &service.find(&name)?, &wanted)?;
            declarations.declare_export(&name, &wanted, &shown);
        }
    }
    Ok(())
}
