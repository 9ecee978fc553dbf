//! Devices and exports of a server, in order of creation.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

/// Description of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Name of the device.
    pub name: String,
    /// Distinguishes devices that had the same name. 32 hex digits.
    pub uuid: String,
    /// Number of times that the content was restarted empty after a crash, plus one.
    #[serde(default = "first_generation", skip_serializing_if = "is_first_generation")]
    pub generation: u64,
    /// Creation parameters: `NAME=KIND,key=value`.
    pub words: String,
    /// The content was lost and the user has not accepted that yet, so the device is not published.
    #[serde(default, skip_serializing_if = "is_false")]
    pub withheld: bool,
    /// Time of the save with the device's content at the last orderly end, in nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saved: Option<u64>,
    /// Size, modification time and inode of each file of the base below kept content.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub base: Vec<String>,
    /// Declared by a configuration file.
    #[serde(default, skip_serializing_if = "is_false")]
    pub declared: bool,
    /// Published at the server's own addresses.
    #[serde(default, skip_serializing_if = "is_false")]
    pub home: bool,
    /// NBD addresses at which the device is the default export (empty name).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub default_at: Vec<String>,
    /// Other exports of the device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exports: Vec<Export>,
}

/// An export of a device. Exactly one of the first three fields is set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// NBD address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd: Option<String>,
    /// Socket of a virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
    /// Number of queues of a block device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ublk: Option<u16>,
    /// Clients may only read.
    #[serde(default, skip_serializing_if = "is_false")]
    pub read_only: bool,
    /// Clients that may connect, as in the program's options; empty for all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
    /// Declared by a configuration file.
    #[serde(default, skip_serializing_if = "is_false")]
    pub declared: bool,
    /// Limits of the export, by option name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, String>,
}

const fn first_generation() -> u64 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn is_first_generation(generation: &u64) -> bool {
    *generation == first_generation()
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn is_false(yes: &bool) -> bool {
    !yes
}

/// All devices of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// Devices by number, in order of creation.
    devices: BTreeMap<u64, Device>,
    numbers: HashMap<String, u64>,
    next: u64,
}

impl Topology {
    /// Returns the devices in order of creation: a device follows those that it is based on.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.devices.values()
    }

    /// Returns the device of a name.
    pub fn find(&self, name: &str) -> Option<&Device> {
        self.devices.get(self.numbers.get(name)?)
    }

    /// Adds a device, or replaces its description.
    pub fn put(&mut self, device: Device) {
        if self.find(&device.name).is_some_and(|old| old.uuid != device.uuid) {
            // Another device with the same name: gets a new position, after the devices that it is based on.
            self.remove(&device.name);
        }
        let next = self.next;
        let number = *self.numbers.entry(device.name.clone()).or_insert(next);
        self.next = next.max(number + 1);
        self.devices.insert(number, device);
    }

    /// Removes a device.
    pub fn remove(&mut self, name: &str) {
        if let Some(number) = self.numbers.remove(name) {
            self.devices.remove(&number);
        }
    }
}
