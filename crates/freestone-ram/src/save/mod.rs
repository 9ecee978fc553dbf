//! Saving of RAM disks, forks and whole families to a file, and their restoration.
//!
//! [`save`] takes a snapshot of all live devices at one moment and writes it while the devices are
//! in use. Objects are saved compressed as they are; written-back pages are read from the backing
//! device and stay there. A fork saves only its own pages, and the content of a snapshot is saved
//! once for all of its forks. Snapshots of an origin, and the origin itself, save only differences
//! from the next older snapshot. A base outside the family is not saved: [`restore`] must be given
//! it again, and verifies that it is the same.
//!
//! The file appears atomically: it is written beside its target, made durable, and renamed. It ends
//! with a commit record, and checksums cover every byte. `docs/save-format.md` describes the
//! format.

mod base;
mod errors;
pub(crate) mod file_codec;
pub(crate) mod format;
pub(crate) mod plan;
pub(crate) mod reader;
pub(crate) mod restore;
pub(crate) mod writer;

use std::path::Path;

pub use self::base::{BaseCheck, BaseIdentity};
pub use self::errors::{RestoreError, SaveError};
use self::format::Over;
use self::plan::{NamedDevice, Plan};
use self::reader::Reader;
pub use self::restore::{Base, restore, restore_watched};
use self::writer::{Contents as FileContents, PageWriter, Writer};
use crate::codec::Algorithm;
use crate::ram::{CollectedPages, PendingSnapshot, Ram, SetupError};
use freestone_core::consistency_group::{self, NotInTime};
use freestone_core::replace::{Durability, MayGo, Place, Replace, SAVE_PREFIX};

/// Longest name of a saved device in bytes.
pub const NAME_BYTES_MAX: usize = 255;
/// Maximum devices and snapshots in a file.
pub const DEVICES_MAX: usize = 1 << 16;
/// Maximum depth of the snapshots below a device.
pub const DEPTH_MAX: u32 = 256;

/// Result of a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Saved {
    /// Pages in the file.
    pub pages: u64,
    /// Pages in the file that could not be read; only in files of [kept devices](crate::keep).
    pub lost: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
}

/// Contents of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contents {
    /// The devices; parents come before their children.
    pub devices: Vec<Device>,
    /// Bases that must be given to restore the devices.
    pub bases: Vec<BaseIdentity>,
    /// Number of pages.
    pub pages: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
}

/// A device in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Name given to [`save`].
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Index of the base in [`Contents::bases`], if there is one.
    pub base: Option<usize>,
    /// Algorithm for newly written pages.
    pub comp_algorithm: Algorithm,
    /// Level of the algorithm; 0 if it has none.
    pub level: i32,
    /// Cap on a fork's own memory in bytes; 0 means no cap.
    pub mem_limit: u64,
}

/// Kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// A disk without a base.
    Disk,
    /// A fork of a base or of a snapshot.
    Fork,
    /// A read-only snapshot.
    Snapshot,
}

/// Saves devices to a file: a snapshot of each live device, all at one moment; snapshots as they
/// are. The names identify the devices at restore. Bases are identified by `check`. `progress`
/// receives the bytes processed and the total, counting ranges of devices that may have content.
///
/// `to` is either the complete old or the complete new file at any time. An old file is replaced if
/// it is a saved file or empty. The new file is written beside it without a name if the file system
/// supports that, else under a name that begins with `.freestone-save-` (removed on failure). Only
/// the user of this process can access it (mode 0600). During the save, writers move overwritten
/// pages to the snapshots, which takes memory.
///
/// # Errors
/// [`SaveError`]; the old file is kept.
pub fn save(
    devices: &[(&str, &Ram)],
    to: &Path,
    check: BaseCheck,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Saved, SaveError> {
    save_with(devices, to, &Options { check, replace: Replace::default(), cancelled: &|| false }, progress)
}

/// Options of a save.
pub struct Options<'a> {
    /// Identification of bases.
    pub check: BaseCheck,
    /// Condition for replacing an old file.
    pub replace: Replace,
    /// Cancellation, polled between pieces of up to 2 MiB. Must stay true once true.
    pub cancelled: &'a dyn Fn() -> bool,
}

/// As [`save`], with all options.
///
/// # Errors
/// As [`save`], and [`SaveError::Cancelled`].
pub fn save_with(
    devices: &[(&str, &Ram)],
    to: &Path,
    options: &Options<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Saved, SaveError> {
    plan::check(devices)?;
    let place = Place::new(to).map_err(|source| SaveError::Write { path: to.to_owned(), source })?;
    let failed = |source| SaveError::Write { path: place.path.clone(), source };
    let may_go: MayGo = options.replace.may_go("saved device", |head| head.starts_with(&format::MAGIC));
    place.check(may_go).map_err(failed)?;
    let go_on = || if (options.cancelled)() { Err(SaveError::Cancelled) } else { Ok(()) };
    let plan = Plan::new(freeze_devices(devices)?)?;
    let unfinished = place.begin(SAVE_PREFIX).map_err(failed)?;
    let mut writer = Writer::new(unfinished.as_file(), &place.path);
    let bases = plan.identify_bases(options.check, options.cancelled)?;
    writer.contents(&FileContents::new(None, &plan, &bases))?;
    let mut writer = PageWriter::new(writer, &plan).all_algorithms()?;
    let all = write_pages(&plan, &mut writer, options.cancelled, progress)?;
    let saved = writer.to.finish()?;
    go_on()?;
    place.put(unfinished, may_go).and_then(Durability::into_result).map_err(failed)?;
    progress(all, all);
    Ok(saved)
}

/// Writes the pages of all nodes. Returns the total reported to `progress`.
pub(crate) fn write_pages(
    plan: &Plan,
    writer: &mut PageWriter<'_>,
    cancelled: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, SaveError> {
    let all = plan.nodes.iter().map(|node| held_bytes(&node.ram)).sum();
    let mut done = 0;
    progress(0, all);
    let mut pages = CollectedPages::default();
    for (number, node) in plan.nodes.iter().enumerate() {
        let since = match node.over {
            Over::After(before) => Some(&plan.nodes[before as usize].ram),
            _ => None,
        };
        let mut next = 0;
        while let Some(held) = node.ram.next_held(next) {
            next = held.end;
            if cancelled() {
                return Err(SaveError::Cancelled);
            }
            node.ram
                .copy_pages(held.clone(), since, &mut pages)
                .map_err(|(page, error)| SaveError::Page { device: node.label.clone(), page, error })?;
            for (page, stored, bytes) in pages.iter() {
                writer.page(number as u32, page, stored, bytes)?;
            }
            done += (held.end - held.start) * freestone_core::PAGE_BYTES as u64;
            // Concurrent writers may have added pages to the snapshot since the count.
            progress(done.min(all), all);
        }
        writer.to.end_of_node()?;
    }
    Ok(all)
}

/// Takes a snapshot of each live device, all at one moment.
fn freeze_devices(devices: &[(&str, &Ram)]) -> Result<Vec<NamedDevice>, SaveError> {
    let setup = |name: &str| {
        let device = name.to_owned();
        move |error| SaveError::Setup { device, error }
    };
    let mut pending: Vec<(usize, PendingSnapshot)> = Vec::new();
    for (number, (name, ram)) in devices.iter().enumerate() {
        if !ram.is_snapshot() {
            pending.push((number, ram.prepare_snapshot().map_err(setup(name))?));
        }
    }
    let mut together: Vec<&mut dyn consistency_group::Pending> =
        pending.iter_mut().map(|(_, pending)| pending as &mut dyn consistency_group::Pending).collect();
    consistency_group::take(&mut together).map_err(|late| {
        let (number, _) = pending[late.at];
        setup(devices[number].0)(SetupError::NotInTime(NotInTime))
    })?;
    let mut frozen: Vec<_> = devices.iter().map(NamedDevice::new).collect();
    for (number, pending) in pending {
        frozen[number].freeze(pending.into_snapshot());
    }
    Ok(frozen)
}

/// Returns the bytes of the ranges in which a device may have content.
fn held_bytes(ram: &Ram) -> u64 {
    let leaves = std::iter::successors(ram.next_held(0), |held| ram.next_held(held.end));
    leaves.map(|held| held.end - held.start).sum::<u64>() * freestone_core::PAGE_BYTES as u64
}

/// Returns the contents of a file after checking that it is complete; does not read its pages.
///
/// # Errors
/// Fails if the file is not a saved one, is incomplete, or its metadata is damaged.
pub fn inspect(path: &Path) -> Result<Contents, RestoreError> {
    Reader::open(path).map(|reader| contents(&reader))
}

/// Reads a whole file and verifies everything that needs no family. `progress` receives the bytes
/// read and the size of the file.
///
/// # Errors
/// As [`restore`], except for errors of bases and memory.
pub fn verify(path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Contents, RestoreError> {
    let mut reader = Reader::open(path)?;
    let all = reader.end.file_bytes;
    while reader.next()?.is_some() {
        progress(reader.at(), all);
    }
    Ok(contents(&reader))
}

pub(crate) fn contents(reader: &Reader) -> Contents {
    let nodes = &reader.nodes;
    let base = |mut over: Over| {
        while let Over::Node(below) | Over::After(below) = over {
            over = nodes[below as usize].over;
        }
        if let Over::Base(base) = over { Some(base as usize) } else { None }
    };
    let first = |mut over: Over| {
        while let Over::After(before) = over {
            over = nodes[before as usize].over;
        }
        over
    };
    let devices = nodes.iter().filter_map(|node| {
        let name = node.name.clone()?;
        let kind = match (node.snapshot, first(node.over)) {
            (true, _) => DeviceKind::Snapshot,
            (false, Over::Nothing) => DeviceKind::Disk,
            (false, _) => DeviceKind::Fork,
        };
        let (comp_algorithm, level, mem_limit) = (node.algorithm, node.level, node.mem_limit);
        Some(Device { name, size: node.size, kind, base: base(node.over), comp_algorithm, level, mem_limit })
    });
    Contents {
        devices: devices.collect(),
        bases: reader.bases.clone(),
        pages: reader.end.pages,
        file_bytes: reader.end.file_bytes,
    }
}
