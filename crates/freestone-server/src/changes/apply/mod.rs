//! Applies a configuration file to a running server.
//!
//! A plan lists all changes before the first one is made, and fails if one of them is impossible. Devices and exports
//! that no file has declared remain, unless `prune` is set.

mod plan;
mod server_settings;

use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use std::sync::atomic::Ordering;

use freestone_control::protocol::RpcError;
use freestone_nbd::AllowList;
use serde_json::{Map, Value};

use self::plan::{Plan, new_lists};
use self::server_settings::check_server;
use crate::changes::recording::Recording;
use crate::declared::{self, DeclaredDevice};
use crate::devices::claims::Claim;
use crate::exports::export_spec::{ExportAddress, ExportSet, ExportSpec};
use crate::service::Service;
use crate::settings::allow;

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
                export_set.exports.iter().try_for_each(|wanted| write!(f, ", at {}", wanted.address))
            }
        }
    }
}

/// Applies the configuration file at `path`. Returns one line per change, made unless `options.check` is set.
pub fn apply(service: &Service, path: &Path, options: ApplyOptions) -> Result<Vec<String>, RpcError> {
    let invalid = |error: anyhow::Error| rpc_error!(EINVAL, "{error:#}");
    let file = declared::read(path).map_err(invalid)?;
    let mut devices = declared::devices(&file, path).map_err(|why| RpcError::invalid(why.0))?;
    if file.ublk || service.as_block_devices.load(Ordering::SeqCst) {
        declared::as_block_devices(&mut devices);
    }
    check_server(service, &file, path)?;
    let home = file.allow.as_deref().map(|words| home_list(service, words)).transpose();
    let home = home.map_err(|why| refusal!(invalid, "{}: allow: {why}", path.display()))?;
    if let Some(list) = &home
        && let Some(is) = service.exports.fixed_server_allow_list()
        && is != *list
    {
        refuse!(EBUSY, "{}: allow: --allow of the server ({is}) takes precedence", path.display());
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
    let known = service.exports.declared_devices();
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
        service.exports.change(&device.spec.name, |device| device.is_declared = true);
    }
    recording.commit()?;
    Ok(done)
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

fn apply_change(
    service: &Service,
    claim: &Claim<'_>,
    change: Change,
    options: ApplyOptions,
) -> Result<(), RpcError> {
    let exports = &service.exports;
    match change {
        Change::Remove(name) => {
            service.remove(claim, &service.find(&name)?, options.force)?;
        }
        Change::Unpublish(name, place) => {
            exports.unpublish_from(claim, &*service.find(&name)?, &place, options.force)?;
        }
        Change::Set(name, attrs) => service.set(&service.find(&name)?, &attrs)?,
        Change::Create(device) => {
            let is_of_file = device.is_of_file();
            let DeclaredDevice { spec, exports: wanted, .. } = *device;
            let (name, publish) = (spec.name.clone(), spec.publish);
            let entry = service.create(claim, spec, false)?;
            if is_of_file {
                exports.change(&name, |device| device.is_declared = true);
            }
            entry.kind.begin_merge(&entry, &service.registry)?;
            if service.is_for_server_addresses(publish, &entry) {
                exports.publish_at_server_addresses(claim, &entry)?;
            }
            for wanted in &wanted {
                exports.publish_at(claim, &entry, wanted)?;
            }
        }
        Change::Withhold(name, export_set) => {
            exports.change(&name, |device| device.set_unpublished(export_set, ""));
        }
        Change::AllowAtServer(list) => exports.set_server_allow_list(&list),
        Change::Allow(name, place, list) => exports.set_allow(&name, &place, list.as_ref()),
        Change::Limit(name, place, wanted) => {
            let limits = wanted.limits;
            exports.limit_at(claim, &*service.find(&name)?, &place, limits)?;
            exports.change(&name, |device| device.set_declared_limits(&place, limits));
        }
        Change::PublishAtServer(name) => exports.publish_at_server_addresses(claim, &service.find(&name)?)?,
        Change::Publish(name, wanted) => {
            let wanted = ExportSpec { declared: true, ..wanted };
            exports.publish_at(claim, &service.find(&name)?, &wanted)?;
        }
    }
    Ok(())
}
