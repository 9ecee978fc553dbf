//! What each device must hold and whether it must exist, as far as the server has answered.

use std::collections::BTreeMap;

use crate::oracle::{Durability, Fill, Kind as Writing, Oracle, Outcome, SECTOR_BYTES, fill};

pub const SECTOR: u64 = SECTOR_BYTES as u64;

/// What becomes of a device's content when its server ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lasts {
    /// The content stays: it is that of a file.
    Always,
    /// The content is saved at an orderly end and now and then.
    Saved,
    /// The content is lost, and the device is withheld.
    Never,
}

/// Whether a device exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    Yes,
    No,
    /// A verb failed or was cut off.
    Unknown,
}

/// One device.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "any of them go together")]
pub struct Disk {
    pub oracle: Oracle,
    pub lasts: Lasts,
    pub presence: Presence,
    pub is_writable: bool,
    /// The device is published at the server's own address.
    pub is_home: bool,
    /// Clients find the device there now.
    pub is_seen: bool,
    /// One failure may make requests fail from then on: the device is a snapshot, which may become invalid,
    /// or has zones, whose write pointer may have moved.
    pub is_fragile: bool,
    /// Sectors that are read.
    pub shown: u64,
    /// Write that filled the file.
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
    pub fn add(&mut self, name: &str, bytes: u64, lasts: Lasts) -> &mut Disk {
        let durability = match lasts {
            Lasts::Always => Durability::Answered,
            Lasts::Saved => Durability::Flushed,
            Lasts::Never => Durability::Nothing,
        };
        let oracle = Oracle::new(name, bytes / SECTOR, durability);
        self.put(name, oracle, lasts)
    }

    /// Adds a device that shows what another one holds now.
    pub fn add_over(&mut self, name: &str, base: &str, lasts: Lasts) -> &mut Disk {
        let durability = if lasts == Lasts::Always { Durability::Answered } else { Durability::Flushed };
        let below = self.disks.get_mut(base).expect("the scene has it");
        let oracle = below.oracle.snapshot(name, durability);
        self.put(name, oracle, lasts)
    }

    fn put(&mut self, name: &str, oracle: Oracle, lasts: Lasts) -> &mut Disk {
        let shown = oracle.size();
        let disk = Disk {
            oracle,
            lasts,
            presence: Presence::Yes,
            is_writable: true,
            is_home: true,
            is_seen: true,
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

    /// Writes a part of a file that a device is about to be made of.
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
