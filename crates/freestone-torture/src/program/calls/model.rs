//! The expected content of each device and whether it must exist, according to the server's answers.

use std::collections::BTreeMap;

use crate::oracle::{Durability, Fill, Kind as Writing, Oracle, Outcome, SECTOR_BYTES, fill};

pub const SECTOR: u64 = SECTOR_BYTES as u64;

/// Lifetime of a device's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// The content is in a file and stays.
    Permanent,
    /// The content is saved at an orderly end and periodically.
    Saved,
    /// The content is lost, and the device is withheld.
    Temporary,
}

/// Whether a device exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    Yes,
    No,
    /// A verb failed or was cut off.
    Unknown,
}

/// A device.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "independent properties")]
pub struct Disk {
    pub oracle: Oracle,
    pub lifetime: Lifetime,
    pub presence: Presence,
    pub is_writable: bool,
    /// The device is published at the server's own address.
    pub uses_server_address: bool,
    /// Clients find the device at that address now.
    pub is_visible: bool,
    /// One failure may make requests fail from then on: the device is a snapshot, which may become invalid,
    /// or has zones, whose write pointer may have moved.
    pub is_fragile: bool,
    /// Number of sectors that are read.
    pub shown: u64,
    /// Id of the write that filled the file.
    pub filled_by: u64,
}

/// All devices of a scene.
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

    /// Adds a device with the current content of another one.
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

    /// Returns a device of the scene.
    pub fn disk(&mut self, name: &str) -> &mut Disk {
        self.disks.get_mut(name).expect("the scene has it")
    }

    /// Returns the number of a new write.
    pub fn write_id(&mut self, filled: Fill) -> u64 {
        self.serial += 1;
        filled.id(self.serial)
    }

    /// Records and returns the content of a file that a device will use.
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
