//! Saving of RAM disks, forks and whole families to a file, and their restoration. A family is a
//! base and its forks, which share memory.
//!
//! [`save`] takes a snapshot of all live devices at one moment, and writes it while the devices are
//! in use. Compressed pages are saved as they are. Written-back pages are read from the backing
//! device and stay there. A fork saves only its own pages, and the content of a snapshot is saved
//! once for all of its forks. Snapshots of an origin, and the origin itself, save only differences
//! from the next older snapshot. A base outside the family is not saved. The caller must give it to
//! [`restore`], which verifies that the base is the same.
//!
//! The file appears atomically: it is written beside its target, made durable, and renamed. The
//! file ends with a commit record, and checksums cover every byte. `docs/reference/save-format.md`
//! describes the format.

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
use self::format::NodeParent;
use self::plan::Plan;
use self::reader::Reader;
pub use self::restore::{Base, restore, restore_with_progress};
use self::writer::{Contents as FileContents, PageWriter, Writer};
use freestone_core::replace::{Durability, ReplaceCheck, ReplacePolicy, ReplaceTarget, SAVE_PREFIX};
use freestone_ram::codec::Algorithm;
use freestone_ram::ram::Ram;
use freestone_ram::transfer::{CollectedPages, ReadStored as _};

/// Longest name of a saved device, in bytes.
pub const NAME_BYTES_MAX: usize = 255;
/// Maximum number of devices and snapshots in a file.
pub const DEVICES_MAX: usize = 1 << 16;
/// Maximum depth of the chain of snapshots below a device.
pub const DEPTH_MAX: u32 = 256;

/// Result of a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SaveReport {
    /// Number of pages in the file.
    pub pages: u64,
    /// Number of pages in the file that are marked as lost, as they could not be read; 0 except in
    /// files of [kept devices](crate::keep).
    pub lost: u64,
    /// Size of the file in bytes.
    pub file_bytes: u64,
}

/// Contents of a saved file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contents {
    /// The named devices in the file; parents come before their children.
    pub devices: Vec<Device>,
    /// Bases that must be given to restore the devices.
    pub bases: Vec<BaseIdentity>,
    /// Number of pages in the file.
    pub pages: u64,
    /// Size of the file in bytes.
    pub file_bytes: u64,
}

/// A device in a saved file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Name given to [`save`].
    pub name: String,
    /// Size of the device in bytes.
    pub size: u64,
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Index of the device's base in [`Contents::bases`]; `None` without a base.
    pub base: Option<usize>,
    /// Compression algorithm for newly written pages.
    pub comp_algorithm: Algorithm,
    /// Compression level; 0 if the algorithm does not have levels.
    pub level: i32,
    /// Memory limit of a fork's own pages in bytes; 0 means no limit.
    pub mem_limit: u64,
}

/// Kind of a saved device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// A disk without a base.
    Disk,
    /// A fork of a base or of a snapshot.
    Fork,
    /// A read-only snapshot.
    Snapshot,
}

/// Saves devices to a file: the content of all live devices at one moment, and snapshots as
/// snapshots. The names identify the devices at restore. `check` selects how bases are identified.
/// `progress` receives the bytes processed and the total, counting ranges of devices that may have
/// content.
///
/// At any time, `to` is either the complete old file or the complete new file. An old file is
/// replaced only if it is a saved file or empty. The new file is written without a name in the same
/// directory if the file system supports that. Otherwise the name begins with `.freestone-save-`,
/// and a failed save removes the file. Only the user of this process can access the file (mode
/// 0600). During the save, writers preserve overwritten pages in the snapshots, which needs memory.
///
/// # Errors
/// Fails with a [`SaveError`]; the old file is then kept.
pub fn save(
    devices: &[(&str, &Ram)],
    to: &Path,
    check: BaseCheck,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<SaveReport, SaveError> {
    save_with(
        devices,
        to,
        &Options { check, replace: ReplacePolicy::default(), cancelled: &|| false },
        progress,
    )
}

/// Options of [`save_with`].
pub struct Options<'a> {
    /// How bases are identified.
    pub check: BaseCheck,
    /// Condition for replacing an old file.
    pub replace: ReplacePolicy,
    /// Returns true to cancel the save. Polled between pieces of up to 2 MiB; once true, it must
    /// stay true.
    pub cancelled: &'a dyn Fn() -> bool,
}

/// Saves devices to a file like [`save`], with all options.
///
/// # Errors
/// Fails like [`save`], and with [`SaveError::Cancelled`] if the save was cancelled.
pub fn save_with(
    devices: &[(&str, &Ram)],
    to: &Path,
    options: &Options<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<SaveReport, SaveError> {
    plan::check(devices)?;
    let place = ReplaceTarget::new(to).map_err(|source| SaveError::Write { path: to.to_owned(), source })?;
    let failed = |source| SaveError::Write { path: place.path.clone(), source };
    let may_go: ReplaceCheck =
        options.replace.check_for("saved device", |head| head.starts_with(&format::MAGIC));
    place.check(may_go).map_err(failed)?;
    let go_on = || if (options.cancelled)() { Err(SaveError::Cancelled) } else { Ok(()) };
    let plan = Plan::new(plan::freeze(devices, &mut |_, _, _| {})?.0)?;
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

/// Writes the pages of all nodes. Returns the total number of bytes reported to `progress`.
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
            NodeParent::After(before) => Some(&plan.nodes[before as usize].ram),
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
            // Concurrent writers may have added pages to the snapshot since the total was counted.
            progress(done.min(all), all);
        }
        writer.to.end_of_node()?;
    }
    Ok(all)
}

/// Returns the total bytes of the ranges in which a device may have content.
fn held_bytes(ram: &Ram) -> u64 {
    let leaves = std::iter::successors(ram.next_held(0), |held| ram.next_held(held.end));
    leaves.map(|held| held.end - held.start).sum::<u64>() * freestone_core::PAGE_BYTES as u64
}

/// Checks that a saved file is complete, and returns its contents without reading its pages.
///
/// # Errors
/// Fails if the file was not saved by Freestone, is incomplete, or its metadata is damaged.
pub fn inspect(path: &Path) -> Result<Contents, RestoreError> {
    Reader::open(path).map(|reader| contents(&reader))
}

/// Reads a whole saved file and verifies everything that does not need a family. `progress`
/// receives the bytes read and the size of the file.
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
    let base = |mut over: NodeParent| {
        while let NodeParent::Node(below) | NodeParent::After(below) = over {
            over = nodes[below as usize].over;
        }
        if let NodeParent::Base(base) = over { Some(base as usize) } else { None }
    };
    let first = |mut over: NodeParent| {
        while let NodeParent::After(before) = over {
            over = nodes[before as usize].over;
        }
        over
    };
    let devices = nodes.iter().filter_map(|node| {
        let name = node.name.clone()?;
        let kind = match (node.snapshot, first(node.over)) {
            (true, _) => DeviceKind::Snapshot,
            (false, NodeParent::Nothing) => DeviceKind::Disk,
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
