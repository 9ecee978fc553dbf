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
use freestone_spec::entries::a_kind;
use freestone_spec::kinds::{Entry, Spec};
use freestone_spec::refusal::Errno;
use freestone_state::State;
use serde_json::{Map, Value};
use tracing::warn;

use crate::allow;
use crate::claims::Claim;
use crate::control::protocol::Fault;
use crate::declared::{self, Declared};
use crate::handshake;
use crate::paths::parse_address;
use crate::places::{Place, Seen, Wanted};
use crate::recording::Recording;
use crate::saves;
use crate::service::Service;

/// Keys that can be changed at run time. If the file no longer has the key, it is set to the second value; `None`
/// means that the key cannot be removed.
const SETTABLE: [(&str, Option<&str>); 19] = [
    ("disksize", None),
    ("size", None),
    ("mem_limit", Some("none")),
    ("mem_min", Some("0")),
    ("full", None),
    ("full_timeout", None),
    ("full_warn", None),
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
    ("on_lost", Some("withhold")),
];

/// Options of applying a configuration.
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    /// Also remove devices and exports that no file declares.
    pub prune: bool,
    /// Continue if clients are connected; their connections are closed.
    pub force: bool,
    /// Only return the changes, without making them.
    pub check: bool,
    /// Keep devices of earlier files that are not declared now: the source is a command line, not a file.
    pub adds: bool,
}

/// A change of a device, an export or an allow list.
#[derive(Debug)]
enum Change {
    Remove(String),
    Unpublish(String, Place),
    Set(String, Map<String, Value>),
    Create(Box<Declared>),
    PublishHome(String),
    AllowHome(AllowList),
    Allow(String, Place, Option<AllowList>),
    Publish(String, Wanted),
    /// Sets the limits of the export at this address to those of the specification.
    Limit(String, Place, Wanted),
    Withhold(String, Seen),
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
            Self::PublishHome(name) => write!(f, "publish {name}"),
            Self::AllowHome(list) => write!(f, "allow {list} at the addresses of the server"),
            Self::Allow(_, place, list) => write!(f, "allow {} at {place}", allow::shown(list.as_ref())),
            Self::Publish(name, wanted) => {
                let how = if wanted.read_only { ", read-only" } else { "" };
                write!(f, "publish {name} at {}{how}", wanted.place)?;
                wanted.limits.words().try_for_each(|(key, text)| write!(f, ", {key}={text}"))
            }
            Self::Limit(name, place, wanted) => {
                write!(f, "limit {name} at {place}")?;
                if wanted.limits.is_none() {
                    return write!(f, ": no limit");
                }
                wanted.limits.words().try_for_each(|(key, text)| write!(f, ", {key}={text}"))
            }
            Self::Withhold(name, seen) => {
                write!(f, "publish {name}, once it is no longer withheld")?;
                seen.exports.iter().try_for_each(|(wanted, _)| write!(f, ", at {}", wanted.place))
            }
        }
    }
}

/// Applies the file at `path`. Returns the changes, which were made unless `extent.check` is set.
pub fn apply(service: &Service, path: &Path, extent: Extent) -> Result<Vec<String>, Fault> {
    let invalid = |error: anyhow::Error| Fault::failed(Errno::EINVAL, format!("{error:#}"));
    let file = declared::read(path).map_err(invalid)?;
    let mut devices = declared::devices(&file, path).map_err(|why| Fault::invalid(why.0))?;
    if file.ublk || service.as_block_devices.load(Ordering::SeqCst) {
        declared::as_block_devices(&mut devices);
    }
    check_server(service, &file, path)?;
    let home = file.allow.as_deref().map(|words| home_list(service, words)).transpose();
    let home = home.map_err(|why| Fault::invalid(format!("{}: allow: {why}", path.display())))?;
    if let Some(list) = &home
        && let Some(is) = service.exports.fixed_home_allow()
        && is != *list
    {
        let why = format!("{}: allow: --allow of the server ({is}) takes precedence", path.display());
        return Err(Fault::failed(Errno::EBUSY, why));
    }
    apply_all(service, &devices, home, extent)
}

/// Parses the allow list of the server's addresses, and checks it against each of them.
fn home_list(service: &Service, words: &[String]) -> Result<AllowList, String> {
    let list = allow::parse(words)?;
    service.exports.home().iter().try_for_each(|address| allow::check(&list, address))?;
    Ok(list)
}

/// Applies these devices without a file.
pub fn apply_devices(service: &Service, devices: &[Declared], extent: Extent) -> Result<Vec<String>, Fault> {
    apply_all(service, devices, None, extent)
}

/// Applies these devices, and the allow list of the server's addresses if there is one.
fn apply_all(
    service: &Service,
    devices: &[Declared],
    home: Option<AllowList>,
    extent: Extent,
) -> Result<Vec<String>, Fault> {
    let known = service.declarations.names();
    let all = if extent.prune { service.registry.all() } else { Vec::new() };
    let mut own: HashSet<&str> = devices.iter().map(|device| device.spec.name.as_str()).collect();
    own.extend(known.iter().map(String::as_str));
    own.extend(all.iter().filter(|entry| entry.template.is_none()).map(|entry| entry.name()));
    let shared: Vec<&str> = devices.iter().filter_map(|device| device.spec.kind.below()).collect();
    own.extend(devices.iter().flat_map(|device| device.spec.kind.changes()));
    let neighbors: Vec<String> =
        devices.iter().flat_map(|device| neighbors_of_new_lists(service, device)).collect();
    own.extend(neighbors.iter().map(String::as_str));
    let own: Vec<&str> = own.into_iter().collect();
    let claim = service.claim_over_all("apply", &own, &shared)?;
    let mut changes = Plan { service, devices, extent }.changes()?;
    if let Some(list) = home.filter(|list| service.exports.home_allow().as_ref() != Some(list)) {
        changes.insert(0, Change::AllowHome(list));
    }
    if extent.check {
        return Ok(changes.iter().map(ToString::to_string).collect());
    }
    let recording = Recording::begin(service, &claim, "apply", &own)?;
    let (mut done, count) = (Vec::new(), changes.len());
    for change in changes {
        let text = change.to_string();
        if let Err(fault) = apply_change(service, &claim, change, extent) {
            let message = format!("{}; {} of {count} changes were made", fault.message, done.len());
            // The changes that were made remain.
            recording.commit()?;
            return Err(Fault { message, ..fault });
        }
        done.push(text);
    }
    for device in devices.iter().filter(|device| device.is_of_file()) {
        service.declarations.declare(&device.spec.name);
    }
    recording.commit()?;
    Ok(done)
}

/// Returns the existing exports of a device whose allow list changes, with the new list.
fn new_lists(service: &Service, device: &Declared) -> Vec<(Place, Option<AllowList>)> {
    let name = &device.spec.name;
    let known = service.declarations.of(name);
    let of = |asked: &Wanted| {
        // With port 0 several exports may have equal addresses.
        let is_other = |before: &Wanted| device.exports.contains(before) && before != asked;
        let of_place = |(before, _): &&(Wanted, Place)| before.place == asked.place && !is_other(before);
        let before = known.iter().find(|(before, _)| before == asked).or_else(|| known.iter().find(of_place));
        let place = before.map_or(&asked.place, |(_, at)| at);
        // A missing list means no change, unless an earlier file had set a list.
        let is_said = asked.allow.is_some() || before.is_some_and(|(before, _)| before.allow.is_some());
        let is_new = service.exports.differs(name, place, asked.allow.as_ref());
        (is_said && is_new).then(|| (place.clone(), asked.allow.clone()))
    };
    device.exports.iter().filter_map(of).collect()
}

/// Returns the names of all exports at the addresses whose list changes: the list applies to all of them.
fn neighbors_of_new_lists(service: &Service, device: &Declared) -> Vec<String> {
    let addresses = new_lists(service, device).into_iter().filter_map(|(place, _)| match place {
        Place::Nbd(address) => Some(address),
        Place::VhostUser(_) | Place::Ublk(_) => None,
    });
    let all = addresses.flat_map(|address| service.exports.nbd.exports_at(&address));
    all.map(|export| export.name).collect()
}

/// Fails if the file changes a setting of the whole server, which takes effect only at a start.
fn check_server(service: &Service, file: &FileConfig, path: &Path) -> Result<(), Fault> {
    let differs = |key: &str, is: String| {
        let why =
            format!("{}: {key}: the server uses {is}; restart the server to change this", path.display());
        Err(Fault::failed(Errno::EBUSY, why))
    };
    let same = |key: &str, said: &str, is: Option<&String>| {
        let is = is.map_or("none", String::as_str);
        if is == said { Ok(()) } else { differs(key, is.to_owned()) }
    };
    let mut home = service.exports.home();
    home.retain(|address| *address != Address::Stdin);
    let is_home = |text: &String| match parse_address(text, Some(&file.base)) {
        // Port 0 stands for the port chosen at the start.
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
    let (now, asked) = (service.saves.keys(), saves::Plan::keys_of(file));
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

/// Computes the changes, and fails if one is impossible.
struct Plan<'a> {
    service: &'a Service,
    devices: &'a [Declared],
    extent: Extent,
}

impl Plan<'_> {
    fn changes(&self) -> Result<Vec<Change>, Fault> {
        let mut changes = Vec::new();
        let removed = self.removals(&mut changes)?;
        for device in self.devices {
            for (place, list) in new_lists(self.service, device) {
                let is_planned = |change: &Change| matches!(change, Change::Allow(_, at, _) if at.is(&place));
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
                    return Err(Fault::failed(Errno::EEXIST, format!("{}{name}: {why}", device.at)));
                }
                Some(entry) => self.change(device, &entry, &mut changes)?,
                None if self.service.records.is_pending(name) => {
                    warn!("{name}: not changed: its server has not answered yet");
                }
                None => {
                    let takes = device.spec.kind.takes();
                    let takes = takes.iter().map(|takes| takes.name);
                    for below in device.spec.kind.below().into_iter().chain(takes) {
                        let is_there = there.contains(below)
                            || (self.service.registry.find(below).is_some() && !removed.contains(below));
                        if !is_there {
                            let why = format!("{}{name}: {below}: there is no such device", device.at);
                            return Err(Fault::failed(Errno::ENODEV, why));
                        }
                    }
                    changes.push(Change::Create(Box::new(device.clone())));
                }
            }
            there.insert(name.clone());
        }
        Ok(changes)
    }

    /// Adds the removals, dependent devices first. Returns the names of removed devices.
    fn removals(&self, changes: &mut Vec<Change>) -> Result<HashSet<String>, Fault> {
        let service = self.service;
        let declared: HashSet<&str> = self.devices.iter().map(|device| device.spec.name.as_str()).collect();
        let known: HashSet<String> = service.declarations.names().into_iter().collect();
        let all = service.registry.all();
        let goes = |entry: &&Arc<Entry>| {
            let name = entry.name();
            entry.template.is_none()
                && !declared.contains(name)
                && (self.extent.prune || (known.contains(name) && !self.extent.adds))
        };
        let removed: HashSet<String> = all.iter().filter(goes).map(|entry| entry.name().to_owned()).collect();
        for entry in all.iter().rev().filter(|entry| removed.contains(entry.name())) {
            let stays = |other: &&Arc<Entry>| {
                let needs = other.needs().iter().any(|needed| Arc::ptr_eq(needed, entry));
                needs && other.template.is_none() && !removed.contains(other.name())
            };
            if let Some(other) = all.iter().find(stays) {
                let why = format!("{}: cannot be removed: {} stands on it", entry.name(), other.name());
                return Err(Fault::failed(Errno::EBUSY, why));
            }
            if !self.extent.force {
                service.exports.check_idle(entry)?;
            }
            changes.push(Change::Remove(entry.name().to_owned()));
        }
        Ok(removed)
    }

    /// Returns the exports that a withheld device gets when it is released.
    fn exports_when_released(&self, device: &Declared, entry: &Arc<Entry>, is: &Seen) -> Seen {
        let home = self.service.belongs_at_home(device.spec.publish, entry);
        let stays = |wanted: &Wanted| !device.exports.iter().any(|other| other.place.is(&wanted.place));
        let by_hand =
            is.exports.iter().filter(|(wanted, declared)| !declared && !self.extent.prune && stays(wanted));
        let of_file = device.exports.iter().map(|asked| {
            let chosen = |(is, _): &&(Wanted, bool)| {
                is.read_only == asked.read_only && is.place.has_chosen_port_of(&asked.place)
            };
            let place = is.exports.iter().find(chosen).map_or(&asked.place, |(is, _)| &is.place);
            (Wanted { place: place.clone(), ..asked.clone() }, device.is_of_file())
        });
        Seen { home, exports: by_hand.cloned().chain(of_file).collect() }
    }

    /// Adds the changes of an existing device.
    fn change(&self, device: &Declared, entry: &Arc<Entry>, changes: &mut Vec<Change>) -> Result<(), Fault> {
        let (service, name) = (self.service, entry.name());
        let attrs = differences(entry, &device.spec)
            .map_err(|why| Fault::failed(Errno::EBUSY, format!("{}{name}: {why}", device.at)))?;
        if !attrs.is_empty() {
            changes.push(Change::Set(name.to_owned(), attrs));
        }
        if let Some(is) = service.withheld.of(name) {
            // A file cannot release a withheld device, only change its later exports.
            let seen = self.exports_when_released(device, entry, &is);
            if !seen.is_same(&is) {
                changes.push(Change::Withhold(name.to_owned(), seen));
            }
            return Ok(());
        }
        let live = service.exports.wanted(name);
        let known = service.declarations.of(name);
        // Absent exports are retried anyhow, unless their specification changes.
        let absent = service.exports.absent.seen(name);
        let is_asked = |is: &Wanted, asked: &Wanted| {
            let place = if is.place.has_chosen_port_of(&asked.place) { &is.place } else { &asked.place };
            let read_only = asked.read_only || entry.is_read_only();
            Wanted { place: place.clone(), read_only, ..asked.clone() } == *is
        };
        for (export, declared) in &absent.exports {
            let is_other = |asked: &Wanted| asked.place.is(&export.place);
            let goes = *declared || self.extent.prune || device.exports.iter().any(is_other);
            if goes && !device.exports.iter().any(|asked| is_asked(export, asked)) {
                changes.push(Change::Unpublish(name.to_owned(), export.place.clone()));
            }
        }
        let is_shown = |wanted: &Wanted| {
            let read_only = wanted.read_only || entry.is_read_only();
            let at = |place: &Place| live.iter().any(|is| is.place.is(place) && is.read_only == read_only);
            at(&wanted.place) || known.iter().any(|(before, place)| before.is_asked_as(wanted) && at(place))
        };
        let is_wanted = |place: &Place| {
            let by = |wanted: &Wanted| {
                is_shown(wanted)
                    && (wanted.place.is(place)
                        || known.iter().any(|(before, at)| before.is_asked_as(wanted) && at.is(place)))
            };
            device.exports.iter().any(by)
        };
        for export in live.iter().filter(|export| !is_wanted(&export.place)) {
            // An export that changes at the same address is unpublished first.
            let is_republished = device.exports.iter().any(|wanted| wanted.place.is(&export.place));
            if self.extent.prune || is_republished || known.iter().any(|(_, at)| at.is(&export.place)) {
                changes.push(Change::Unpublish(name.to_owned(), export.place.clone()));
            }
        }
        let home = service.exports.home();
        let at_home = home.iter().filter(|address| service.exports.is_at(name, address));
        let at_home: Vec<_> = at_home.cloned().collect();
        let belongs = service.belongs_at_home(device.spec.publish, entry);
        if belongs && at_home.len() < home.len() && !absent.home {
            changes.push(Change::PublishHome(name.to_owned()));
        } else if !belongs {
            changes.extend(at_home.into_iter().map(|at| Change::Unpublish(name.to_owned(), Place::Nbd(at))));
        }
        for wanted in device.exports.iter().filter(|wanted| is_shown(wanted)) {
            let is_there = |is: &&Wanted| {
                let by_file = |(before, at): &(Wanted, Place)| before.is_asked_as(wanted) && at.is(&is.place);
                wanted.place.is(&is.place) || known.iter().any(by_file)
            };
            if let Some(is) = live.iter().find(is_there).filter(|is| is.limits != wanted.limits) {
                changes.push(Change::Limit(name.to_owned(), is.place.clone(), wanted.clone()));
            }
        }
        let is_absent = |wanted: &&Wanted| absent.exports.iter().any(|(export, _)| is_asked(export, wanted));
        let missing = device.exports.iter().filter(|wanted| !is_shown(wanted) && !is_absent(wanted));
        changes.extend(missing.map(|wanted| Change::Publish(name.to_owned(), wanted.clone())));
        Ok(())
    }
}

/// Returns the attributes to set so that the device has its new specification.
///
/// # Errors
/// The end of a sentence: the difference cannot be set at run time.
fn differences(entry: &Entry, asked: &Spec) -> Result<Map<String, Value>, String> {
    let now = entry.words.now(&entry.spec);
    let is = Spec::from_entries(now.clone()).map_err(|_| "was restored from a file".to_owned())?;
    let mut attrs = Map::new();
    if is.is_same(asked) {
        return Ok(attrs);
    }
    if now.kind != asked.words.kind {
        return Err(format!("is {} device; remove it first", a_kind(&now.kind)));
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
        // Different spellings can mean the same value.
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

fn apply_change(service: &Service, claim: &Claim<'_>, change: Change, extent: Extent) -> Result<(), Fault> {
    let (exports, declarations) = (&service.exports, &service.declarations);
    match change {
        Change::Remove(name) => {
            service.remove(claim, &service.find(&name)?, extent.force)?;
        }
        Change::Unpublish(name, place) => {
            exports.hide_at(claim, &*service.find(&name)?, &place, extent.force)?;
            declarations.forget_export(&name, &place);
        }
        Change::Set(name, attrs) => service.set(&service.find(&name)?, &attrs)?,
        Change::Create(device) => {
            let is_of_file = device.is_of_file();
            let Declared { spec, exports: wanted, .. } = *device;
            let (name, publish) = (spec.name.clone(), spec.publish);
            let entry = service.create(claim, spec, false)?;
            if is_of_file {
                declarations.declare(&name);
            }
            entry.kind.begin_merge(&entry, &service.registry)?;
            if service.belongs_at_home(publish, &entry) {
                exports.publish_home(claim, &entry)?;
            }
            for wanted in &wanted {
                let shown = exports.show_at(claim, &entry, wanted)?;
                if is_of_file {
                    declarations.declare_export(&name, wanted, &shown);
                }
            }
        }
        Change::Withhold(name, seen) => service.withheld.set_seen(&name, seen),
        Change::AllowHome(list) => exports.set_home_allow(&list),
        Change::Allow(name, place, list) => {
            exports.set_allow(&name, &place, list.as_ref());
            for name in declarations.names() {
                declarations.allow(&name, &place, list.as_ref());
            }
        }
        Change::Limit(name, place, wanted) => {
            let limits = wanted.limits;
            let at = Wanted { place, ..wanted };
            exports.limit_at(claim, &*service.find(&name)?, &at, limits)?;
            declarations.limit_export(&name, &at.place, limits);
        }
        Change::PublishHome(name) => exports.publish_home(claim, &service.find(&name)?)?,
        Change::Publish(name, wanted) => {
            let shown = exports.show_at(claim, &service.find(&name)?, &wanted)?;
            declarations.declare_export(&name, &wanted, &shown);
        }
    }
    Ok(())
}
