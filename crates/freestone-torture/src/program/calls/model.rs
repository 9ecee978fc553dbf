//! The expected content of each device, and whether the device must exist, according to the outcomes of verbs
//! and requests.

use std::collections::BTreeMap;

use crate::oracle::{Durability, Fill, Kind as Writing, Oracle, Outcome, SECTOR_BYTES, fill};

pub const SECTOR: u64 = SECTOR_BYTES as u64;

/// Lifetime of a device's content, which depends on the place of the content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// The content is in a file and survives any end.
    Permanent,
    /// The content is in memory, and is saved periodically and at an orderly end.
    Saved,
    /// The content is in memory and lost. The next server withholds the device (does not serve it).
    Temporary,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    Yes,
    No,
    /// Unknown: the verb that creates or removes the device failed or had no answer.
    Unknown,
}

/// The expected state of a device.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "independent properties")]
pub struct Disk {
    pub oracle: Oracle,
    pub lifetime: Lifetime,
    pub presence: Presence,
    pub is_writable: bool,
    /// The device is published at the server's own NBD socket.
    pub uses_server_address: bool,
    /// Clients find the device at that socket now.
    pub is_visible: bool,
    /// A single failing call may make later requests fail. The device is a snapshot, which may become
    /// invalid, or has zones, whose write pointer may have moved.
    pub is_fragile: bool,
    /// Number of sectors, from the start, whose content is checked.
    pub shown: u64,
    /// Id of the write that filled the file of the device.
    pub filled_by: u64,
}

/// The expected states of all devices of a scene, by name.
#[derive(Debug, Clone, Default)]
pub struct Model {
    pub disks: BTreeMap<String, Disk>,
    serial: u64,
}

impl Model {
    /// Adds a device that is all zeroes.
    pub fn add(&mut self, name: &str, bytes: u64, lifetime: Lifetime) -> &mut Disk {
        let durability = match lifetime {
            Lifetime::Permanent => Durability::Completed,
            Lifetime::Saved => Durability::Flushed,
            Lifetime::Temporary => Durability::Nothing,
        };
        let oracle = Oracle::new(name, bytes / SECTOR, durability);
        self.put(name, oracle, lifetime)
    }

    /// Adds a device that starts with the current content of the device `base`.
    pub fn add_over(&mut self, name: &str, base: &str, lifetime: Lifetime) -> &mut Disk {
        let durability =
            if lifetime == Lifetime::Permanent { Durability::Completed } else { Durability::Flushed };
        let below = self.disks.get_mut(base).expect("the scene has it");
        let oracle = below.oracle.snapshot(name, durability);
        self.put(name, oracle, lifetime)
    }

    fn put(&mut self, name: &str, oracle: Oracle, lifetime: Lifetime) -> &mut Disk {
        let shown = oracle.size();
        let disk = Disk {
            oracle,
            lifetime,
            presence: Presence::Yes,
            is_writable: true,
            uses_server_address: true,
            is_visible: true,
            is_fragile: false,
            shown,
            filled_by: 0,
        };
        self.disks.insert(name.to_owned(), disk);
        self.disk(name)
    }

    /// Returns the device with this name.
    ///
    /// # Panics
    /// Panics if the scene does not have the device.
    pub fn disk(&mut self, name: &str) -> &mut Disk {
        self.disks.get_mut(name).expect("the scene has it")
    }

    pub fn write_id(&mut self, filled: Fill) -> u64 {
        self.serial += 1;
        filled.id(self.serial)
    }

    /// Generates the content of the file on which a device lies, and records it as written.
    pub fn fill_file(&mut self, name: &str, bytes: u64) -> Vec<u8> {
        let id = self.write_id(Fill::Text);
        self.disk(name).filled_by = id;
        let oracle = &mut self.disk(name).oracle;
        let sectors = bytes / SECTOR;
        let token = oracle.begin_write(id, 0..sectors, Writing::Write);
        oracle.end(token, Outcome::Done { fua: true });
        let mut content = vec![0; bytes as usize];
        fill(id, 0, &mut content);
        content
    }
}
