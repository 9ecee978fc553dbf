//! The topology of a server: its devices and exports, in order of creation.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

/// Recorded description of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Name of the device, unique among the devices of the server.
    pub name: String,
    /// Unique id (32 hex digits), which distinguishes this device from earlier ones with the same
    /// name.
    pub uuid: String,
    /// 1, plus the number of times that the device was restarted empty after a crash.
    #[serde(default = "first_generation", skip_serializing_if = "is_first_generation")]
    pub generation: u64,
    /// Creation parameters, as `NAME=KIND,key=value`.
    pub words: String,
    /// True if the content was lost in a crash and the user has not accepted that yet. The device
    /// is then not published.
    #[serde(default, skip_serializing_if = "is_false")]
    pub withheld: bool,
    /// Time of the save that contains the content at the last orderly shutdown, in nanoseconds
    /// since 1970; `None` without a save.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saved: Option<u64>,
    /// Size, modification time and inode, as text, of each file of the base on which kept content
    /// depends.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub base: Vec<String>,
    /// True if a configuration file declares the device.
    #[serde(default, skip_serializing_if = "is_false")]
    pub declared: bool,
    /// True if the device is published at the server's own addresses.
    #[serde(default, skip_serializing_if = "is_false")]
    pub home: bool,
    /// NBD addresses at which the device is the default export (with the empty export name).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub default_at: Vec<String>,
    /// Exports of the device in addition to those of `home` and `default_at`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exports: Vec<Export>,
}

/// An export of a device. Exactly one of `nbd`, `vhost_user` and `ublk` is set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// Address of the NBD server for this export.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd: Option<String>,
    /// Path of the vhost-user socket for a virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
    /// Number of queues of the ublk block device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ublk: Option<u16>,
    /// True if clients may only read.
    #[serde(default, skip_serializing_if = "is_false")]
    pub read_only: bool,
    /// Clients that may connect, in the syntax of the program's options; empty to allow all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
    /// True if a configuration file declares the export.
    #[serde(default, skip_serializing_if = "is_false")]
    pub declared: bool,
    /// Limits of the export, by the name of the option that sets the limit.
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

/// All devices of a server, with their exports.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// Devices by sequence number, in order of creation.
    devices: BTreeMap<u64, Device>,
    numbers: HashMap<String, u64>,
    next: u64,
}

impl Topology {
    /// Returns the devices in order of creation: a device comes after the devices it is based on.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.devices.values()
    }

    /// Returns the device with the name `name`; `None` if there is none.
    pub fn find(&self, name: &str) -> Option<&Device> {
        self.devices.get(self.numbers.get(name)?)
    }

    /// Adds a device, or replaces the description of the device with the same name and uuid.
    pub fn put(&mut self, device: Device) {
        if self.find(&device.name).is_some_and(|old| old.uuid != device.uuid) {
            // The new device only has the same name as the old one: give it a new position, after
            // the devices it is based on.
            self.remove(&device.name);
        }
        let next = self.next;
        let number = *self.numbers.entry(device.name.clone()).or_insert(next);
        self.next = next.max(number + 1);
        self.devices.insert(number, device);
    }

    /// Removes the device with the name `name`, if there is one.
    pub fn remove(&mut self, name: &str) {
        if let Some(number) = self.numbers.remove(name) {
            self.devices.remove(&number);
        }
    }
}
