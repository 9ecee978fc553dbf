//! Devices that a configuration file declares, with their exports. This module checks only their text, and
//! opens no device.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use anyhow::Result;
use freestone_nbd::{Address, AllowList};
use freestone_spec::kinds::{KindSpec, Spec};

use crate::config::{self, ConfigError, FileConfig};
use crate::exports::export_spec::{ExportAddress, ExportSpec};
use crate::usage::Usage;

/// A declared device with its exports, except those at the addresses of the server.
#[derive(Debug, Clone, PartialEq)]
pub struct DeclaredDevice {
    /// Specification of the device, with name and kind.
    pub spec: Spec,
    /// Exports at other addresses than those of the server.
    pub exports: Vec<ExportSpec>,
    /// Prefix of error messages: the position in the configuration file, as `FILE: line N: `. Empty for a
    /// device of the command line.
    pub at: String,
}

impl DeclaredDevice {
    /// Returns a device that the command line declares, without exports of its own.
    pub fn word(spec: Spec) -> Self {
        Self { spec, exports: Vec::new(), at: String::new() }
    }

    /// Returns true if a file declares the device.
    pub fn is_of_file(&self) -> bool {
        !self.at.is_empty()
    }
}

/// Reads a configuration file. Returns a [`Usage`] error if the content is invalid.
pub fn read(path: &Path) -> Result<FileConfig> {
    config::read(path).map_err(|error| match error {
        ConfigError::Content(why) => Usage(why).into(),
        error => error.into(),
    })
}

/// Returns the devices that `file` declares. `path` names the file in errors. A table with `count` declares
/// that many devices.
pub fn devices(file: &FileConfig, path: &Path) -> Result<Vec<DeclaredDevice>, Usage> {
    let mut names = HashSet::new();
    let mut devices = Vec::new();
    // For each address: the first device exported there, and the allow list, which all other exports must
    // repeat.
    let mut lists: HashMap<ExportAddress, (String, Option<AllowList>)> = HashMap::new();
    for words in &file.devices {
        let at = |line: usize, why: String| Usage(format!("{}: line {line}: {why}", path.display()));
        for (entries, exports) in words.expand() {
            let spec = Spec::from_entries(entries.with_base(&file.base));
            let spec = spec.map_err(|error| at(words.line_of(&error), error.to_string()))?;
            let name = spec.name.clone();
            let of_device = |line: usize, why: String| at(line, format!("{name}: {why}"));
            let mut wanted: Vec<ExportSpec> = Vec::new();
            for export in &exports {
                let one = ExportSpec::of(export, &file.base).map_err(|why| of_device(export.line, why))?;
                let is_template = matches!(spec.kind, KindSpec::Template(_));
                if is_template && !matches!(one.address, ExportAddress::Nbd(_)) {
                    let why = "export: a template is published over NBD; publish a fork of it";
                    return Err(of_device(export.line, why.into()));
                }
                if wanted.iter().any(|other| other.address.is_same(&one.address)) {
                    return Err(of_device(export.line, "export: the same place twice".into()));
                }
                let is_shared = matches!(one.address, ExportAddress::Nbd(_)) && one.address.has_fixed_port();
                if is_shared {
                    let first = || (name.clone(), one.allow.clone());
                    let (other, list) = lists.entry(one.address.clone()).or_insert_with(first);
                    if *list != one.allow {
                        let why = format!(
                            "export: allow: must be the same for all exports at {}, and {other} has another list",
                            one.address
                        );
                        return Err(of_device(export.line, why));
                    }
                }
                wanted.push(one);
            }
            if !names.insert(name.clone()) {
                return Err(of_device(words.line(), "two devices of that name".into()));
            }
            let at = format!("{}: line {}: ", path.display(), words.line());
            devices.push(DeclaredDevice { spec, exports: wanted, at });
        }
    }
    Ok(devices)
}

/// Fails if an export sets an allow list at an address of the server that differs from the server's list.
pub fn check_lists(
    devices: &[DeclaredDevice],
    home: &[Address],
    list: Option<&AllowList>,
) -> Result<(), Usage> {
    for DeclaredDevice { spec, exports, at } in devices {
        let is_other = |wanted: &&ExportSpec| wanted.allow.is_some() && wanted.allow.as_ref() != list;
        for ExportSpec { address: place, .. } in exports.iter().filter(is_other) {
            if matches!(place, ExportAddress::Nbd(address) if home.contains(address))
                && place.has_fixed_port()
            {
                let why =
                    format!("export: allow: {place} is an address of the server; set its list with --allow");
                return Err(Usage(format!("{at}{}: {why}", spec.name)));
            }
        }
    }
    Ok(())
}

/// Returns the names of the devices that `devices` use exclusively, such as COW devices.
pub fn taken(devices: &[DeclaredDevice]) -> HashSet<&str> {
    devices.iter().flat_map(|device| device.spec.kind.exclusive_uses()).map(|takes| takes.name).collect()
}

/// Adds a ublk export to each published device that has none.
pub fn as_block_devices(devices: &mut [DeclaredDevice]) {
    let taken: HashSet<String> = taken(devices).into_iter().map(str::to_owned).collect();
    for device in devices {
        let spec = &device.spec;
        // By default a device that another one uses exclusively is not published. A template has no data, so
        // it cannot be a block device.
        let published = spec.publish.unwrap_or_else(|| !taken.contains(&spec.name));
        let is_template = matches!(spec.kind, KindSpec::Template(_));
        let declared = device.is_of_file();
        let wanted = ExportSpec { declared, ..ExportSpec::at(ExportAddress::Ublk(0)) };
        if published
            && !is_template
            && !device.exports.iter().any(|other| other.address.is_same(&wanted.address))
        {
            device.exports.push(wanted);
        }
    }
}

/// Fails if a device needs a device that is not declared before it.
pub fn check_order(devices: &[DeclaredDevice]) -> Result<(), Usage> {
    let mut there = HashSet::new();
    for DeclaredDevice { spec, at, .. } in devices {
        let below = if matches!(spec.kind, KindSpec::Snapshot(_)) { "origin" } else { "base" };
        let below = spec.kind.parent_name().map(|needed| (below, needed, needed));
        let takes = spec.kind.exclusive_uses().into_iter().map(|takes| (takes.key, takes.typed, takes.name));
        if let Some((key, typed, _)) = below.into_iter().chain(takes).find(|(.., name)| !there.contains(name))
        {
            let why = "there is no such device before it";
            return Err(Usage(format!("{at}{}: {key}={typed}: {why}", spec.name)));
        }
        there.insert(spec.name.as_str());
    }
    Ok(())
}
