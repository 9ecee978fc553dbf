//! Saving RAM disks, forks and whole families to a file, and restoring them.
//!
//! [`save`] takes a snapshot of everything live at one moment and writes it out while the devices
//! go on; what was compressed stays compressed, what was spilled is read from the backing device
//! and stays there. A fork of a device saves only what it holds itself; so does one of a snapshot,
//! of which the content is saved once for all of its forks. Of snapshots of one origin, and of that
//! itself, each saves only what differs from the one before. A base that is not of this family is
//! not saved: [`restore`] is given it again, and checks that it is the same.
//!
//! The file is complete or it is not there: it is written beside its target, made durable, and
//! renamed. It ends with a commit record, and every byte is under a checksum; the map of it is in
//! `docs/save-format.md`.

mod base;
mod errors;
pub(crate) mod format;
pub(crate) mod known;
pub(crate) mod plan;
pub(crate) mod reader;
pub(crate) mod restore;
pub(crate) mod writer;

use std::path::Path;

pub use self::base::{BaseCheck, BaseIdentity};
pub use self::errors::{RestoreError, SaveError};
use self::format::Over;
use self::plan::Plan;
use self::reader::Reader;
pub use self::restore::{Base, restore, restore_watched};
use self::writer::{Contents as FileContents, PageWriter, Writer};
use crate::codec::Algorithm;
use crate::ram::{Gathered, PendingSnapshot, Ram, SetupError};
use freestone_core::consistency_group::{self, NotInTime};
use freestone_core::replace::{Durability, MayGo, Place, Replace, SAVE_PREFIX};

/// Longest name of a saved device in bytes.
pub const NAME_BYTES_MAX: usize = 255;
/// Most devices and snapshots in a file.
pub const DEVICES_MAX: usize = 1 << 16;
/// Most snapshots that lie one over the other below a device.
pub const DEPTH_MAX: u32 = 256;

/// What was saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Saved {
    /// Pages that are in the file.
    pub pages: u64,
    /// Pages among them that could not be read, in files of [kept devices](crate::keep).
    pub lost: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
}

/// What a file holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contents {
    /// The devices, those that others lie over first.
    pub devices: Vec<Device>,
    /// What must be given to restore them.
    pub bases: Vec<BaseIdentity>,
    /// Pages.
    pub pages: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
}

/// A device in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// As it was given to [`save`].
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// What it is.
    pub kind: DeviceKind,
    /// The base at the bottom, by its index in [`Contents::bases`], if there is one.
    pub base: Option<usize>,
    /// The algorithm that its pages were compressed with.
    pub comp_algorithm: Algorithm,
    /// That one's level; 0 where it has none.
    pub level: i32,
}

/// Kinds of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// A disk over nothing.
    Disk,
    /// A fork of a base or of a snapshot.
    Fork,
    /// A snapshot, read-only.
    Snapshot,
}

/// Saves devices to a file: of each live one a snapshot, all at one moment; a snapshot as it is.
/// Names are what they are restored under. Bases are identified as `check` says. `progress` is
/// given what was looked through and all there is, in bytes of the devices where they may hold
/// something.
///
/// `to` is the old file or the whole new one at any moment. An old file is replaced if it is a
/// saved one too, or empty. The new one is written beside it, without a name where the file system
/// can do that (else under one that begins with `.freestone-save-`, which a failure removes), and
/// belongs to this process's user alone (mode 0600). While it is written the origins' writers leave
/// what they overwrite to the snapshots, so that takes memory.
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

/// How devices are saved.
pub struct Options<'a> {
    /// How bases are identified.
    pub check: BaseCheck,
    /// Which old file is replaced.
    pub replace: Replace,
    /// Asked between pieces of up to 2 MiB: whether to stop. Once true, it stays true.
    pub cancelled: &'a dyn Fn() -> bool,
}

/// As [`save`], with all choices.
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
    let plan = Plan::new(frozen(devices)?)?;
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

/// Writes what all nodes hold. Returns how much that was for `progress`.
pub(crate) fn write_pages(
    plan: &Plan,
    writer: &mut PageWriter<'_>,
    cancelled: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, SaveError> {
    let all = plan.nodes.iter().map(|node| held_bytes(&node.ram)).sum();
    let mut done = 0;
    progress(0, all);
    let mut pages = Gathered::default();
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
            // Where the origin's writers came to before us there may be more than was counted.
            progress(done.min(all), all);
        }
        writer.to.end_of_node()?;
    }
    Ok(all)
}

/// The snapshots that are saved, each with its name, and whether it was taken of a live device now.
fn frozen(devices: &[(&str, &Ram)]) -> Result<Vec<(String, Ram, bool)>, SaveError> {
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
    let mut frozen: Vec<_> =
        devices.iter().map(|(name, ram)| ((*name).to_owned(), (*ram).clone(), false)).collect();
    for (number, pending) in pending {
        (frozen[number].1, frozen[number].2) = (pending.into_snapshot(), true);
    }
    Ok(frozen)
}

/// Bytes of a device where it may hold something.
fn held_bytes(ram: &Ram) -> u64 {
    let leaves = std::iter::successors(ram.next_held(0), |held| ram.next_held(held.end));
    leaves.map(|held| held.end - held.start).sum::<u64>() * freestone_core::PAGE_BYTES as u64
}

/// Says what a file holds, once it has been seen to be complete; its pages are not looked at.
///
/// # Errors
/// Not a saved file, not a complete one, or damaged where that is said.
pub fn inspect(path: &Path) -> Result<Contents, RestoreError> {
    Reader::open(path).map(|reader| contents(&reader))
}

/// Reads a whole file and checks everything that can be checked without a family. `progress` is
/// given bytes of the file, done and in all.
///
/// # Errors
/// As [`restore`], but for what concerns bases and memory.
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
        let (comp_algorithm, level) = (node.algorithm, node.level);
        Some(Device { name, size: node.size, kind, base: base(node.over), comp_algorithm, level })
    });
    Contents {
        devices: devices.collect(),
        bases: reader.bases.clone(),
        pages: reader.end.pages,
        file_bytes: reader.end.file_bytes,
    }
}
