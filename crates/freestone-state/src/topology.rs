//! The devices, in the order in which they were made.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

/// A device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// By which it is told from another one that had the name before: 32 hex digits.
    pub uuid: String,
    /// Of its content: how often that was begun anew, because a server that ended has lost it.
    #[serde(default = "first", skip_serializing_if = "is_first")]
    pub generation: u64,
    /// The words that make it: `NAME=KIND,key=value`.
    pub words: String,
    /// Its content was lost, and nobody has said yet that it may be seen as it is.
    #[serde(default, skip_serializing_if = "is_false")]
    pub withheld: bool,
    /// The save that has what it held when the server ended, by its moment in nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saved: Option<u64>,
    /// Size, time of modification and inode of each file of the base that kept content lies over.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub base: Vec<String>,
    /// A file has declared it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub declared: bool,
    /// It is published at the addresses of the server.
    #[serde(default, skip_serializing_if = "is_false")]
    pub home: bool,
    /// NBD addresses where it answers to the empty name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub default_at: Vec<String>,
    /// Where else it is published.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exports: Vec<Export>,
}

/// A place where a device is published: one of the first three.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// An NBD address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd: Option<String>,
    /// The socket of a virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
    /// The queues of a block device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ublk: Option<u16>,
    /// Nobody writes there.
    #[serde(default, skip_serializing_if = "is_false")]
    pub read_only: bool,
    /// Only these may connect there, in words of the program; none: whoever can.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
    /// A file has declared it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub declared: bool,
    /// What it lets through, by key, where that is limited.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, String>,
}

const fn first() -> u64 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn is_first(generation: &u64) -> bool {
    *generation == first()
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn is_false(yes: &bool) -> bool {
    !yes
}

/// All devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// By number, in the order of coming.
    devices: BTreeMap<u64, Device>,
    numbers: HashMap<String, u64>,
    next: u64,
}

impl Topology {
    /// In the order in which they were made: what stands on others comes behind these.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.devices.values()
    }

    /// The device of that name.
    pub fn find(&self, name: &str) -> Option<&Device> {
        self.devices.get(self.numbers.get(name)?)
    }

    /// A new device, or what became of one that is there.
    pub fn put(&mut self, device: Device) {
        if self.find(&device.name).is_some_and(|old| old.uuid != device.uuid) {
            // Another one of that name: it stands on what came before it, and not before the old one.
            self.remove(&device.name);
        }
        let next = self.next;
        let number = *self.numbers.entry(device.name.clone()).or_insert(next);
        self.next = next.max(number + 1);
        self.devices.insert(number, device);
    }

    /// A device is gone.
    pub fn remove(&mut self, name: &str) {
        if let Some(number) = self.numbers.remove(name) {
            self.devices.remove(&number);
        }
    }
}
