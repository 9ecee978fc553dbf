//! Content of devices kept in a directory across restarts of the server.
//!
//! [`Keep::save`] writes what devices of a family hold at one moment: a whole file first, later
//! increments with the changes since the last save. For this, changed pages of saved devices are
//! recorded in a bitmap; other devices pay nothing. [`Keep::merge_if_due`] merges the files,
//! independently of the devices. [`Keep::restore`] recreates the devices: they can be used at once
//! and read missing pages from the files, while [`Loading`] loads these into memory.
//!
//! A file appears atomically when it is complete, as in [`save`](crate::save). The newest whole
//! file and the increments that continue it are restored. `docs/save-format.md` describes the
//! format.
//!
//! The module has no threads or timers: the caller decides when to save, merge and load.

mod dir;
mod errors;
mod file;
mod index;
mod load;
mod merge;
mod restore;
mod save;
mod source;
#[cfg(test)]
mod tests;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use self::dir::{Chain, ChainFile, Dir};
pub use self::errors::KeepError;
use self::file::scan;
pub use self::load::{Loaded, Loading};
use self::restore::{MergedChain, RestoredDevices};
use self::save::{LastSave, SavePoint, Unread};
use crate::ram::{Family, Lower, Ram};
use crate::save::format::Over;
use crate::save::writer::Writer;
use crate::save::{self as saved, Base, BaseCheck, Contents, RestoreError, SaveError};
use freestone_core::PAGE_BYTES;
use freestone_core::mutants::{self, Mutant};
use freestone_core::replace::{Durability, MayGo, Place, SAVE_PREFIX};

/// Number of increments above which they are [merged](Keep::merge_if_due).
pub const INCREMENTS_MAX: usize = 16;
/// Size of all increments, in percent of the whole file, above which they are merged.
pub const INCREMENTS_PERCENT_MAX: u64 = 50;
/// Number of unmerged files at which the next save writes a whole file.
const FILES_MAX: usize = 200;
/// Bytes of a page's record in a file, without data.
const RECORD_BYTES: u64 = 16;
/// Approximate bytes of a file without pages.
const FILE_BYTES: u64 = 4096;

/// A directory with kept devices. Locked against other openers; used by one thread at a time.
pub struct Keep {
    dir: Dir,
    check: BaseCheck,
    chain: Option<Chain>,
    kept: Option<Kept>,
    /// State of the newest save in terms of this process's devices; `None` if it has none of them.
    last: Option<LastSave>,
    /// Whether a crash may undo the last file. If so, the next save starts a new generation with a
    /// whole file.
    next_is_whole: bool,
}

/// Policy for damaged files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Damaged {
    /// Fail to open the directory. Only the end of the newest file may be missing: that save was
    /// incomplete, and the previous one is used.
    #[default]
    Refuse,
    /// Use the saves before the damaged files, if any. Everything but page data is checked.
    LeaveOut,
}

/// Contents of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// The devices, and the requirements to restore them. `pages` are those of the newest file.
    pub contents: Contents,
    /// Time at which the devices held this content.
    pub when: SystemTime,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// Number of increments.
    pub increments: usize,
    /// Number of newer, unusable files.
    pub left_out: usize,
}

/// Kind of a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrote {
    /// A whole file with all content.
    Whole,
    /// An increment with the changes since the previous save.
    Increment,
    /// No file, as nothing changed.
    Nothing,
}

/// Result of a complete and durable save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptNow {
    /// Kind of the save.
    pub wrote: Wrote,
    /// Pages in the file.
    pub pages: u64,
    /// Pages in the file that could not be read.
    pub lost: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Time at which the devices held the content.
    pub when: SystemTime,
}

/// Estimate of the next save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// Expected kind of the save. (Later events may turn it into a whole one.)
    pub wrote: Wrote,
    /// Bytes of the file. Old files are removed only after the new one is complete.
    pub bytes: u64,
    /// Free bytes of the directory's file system.
    pub free_bytes: u64,
}

impl Estimate {
    /// Returns true if the file fits in the free space.
    pub fn fits(&self) -> bool {
        self.bytes <= self.free_bytes
    }
}

impl Keep {
    /// Opens a directory, creating it with mode 0700 if necessary, and removes unfinished files of
    /// a crash. Bases are identified by samples.
    ///
    /// # Errors
    /// Fails if the directory is unusable or in use, or if its files are of a newer Freestone
    /// version or visibly damaged (without reading their data).
    pub fn open(dir: &Path) -> Result<Self, KeepError> {
        Self::open_with(dir, BaseCheck::default(), Damaged::default())
    }

    /// As [`open`](Self::open), with a choice of base identification and of the policy for damaged
    /// files.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(dir: &Path, check: BaseCheck, damaged: Damaged) -> Result<Self, KeepError> {
        let dir = Dir::open(dir)?;
        let chain = dir.chain(damaged)?;
        let mut keep = Self { dir, check, chain, kept: None, last: None, next_is_whole: false };
        keep.update_contents();
        // The previous process may have ended before its last file's name was durable, or before it
        // removed the old files.
        if let Err(error) = keep.dir.sync() {
            tracing::warn!("kept devices: the next save will be a whole file: {error}");
            keep.next_is_whole = true;
        } else if keep.chain.as_ref().is_some_and(|chain| chain.left_out == 0 && !chain.has_lost()) {
            keep.remove_old(None, true);
        }
        Ok(keep)
    }

    /// Returns the contents of the directory; `None` if it is empty.
    pub fn contents(&self) -> Option<&Kept> {
        self.kept.as_ref()
    }

    fn update_contents(&mut self) {
        self.kept = self.chain.as_ref().and_then(|chain| {
            Some(Kept {
                contents: chain.contents.clone(),
                when: chain.files.last()?.when,
                file_bytes: chain.bytes(),
                increments: chain.files.len() - 1,
                left_out: chain.left_out,
            })
        });
    }

    // ---- saving ---------------------------------------------------------------------------------

    /// Returns an estimate of the next [`save`](Self::save) of these devices.
    ///
    /// # Errors
    /// Fails if the file system does not report its free space.
    pub fn estimate(&self, devices: &[(&str, &Ram)]) -> Result<Estimate, KeepError> {
        let free_bytes = self.dir.free_bytes()?;
        let (mut bytes, mut pages) = (0, 0);
        for (of_device, of_pages) in devices.iter().map(|(_, ram)| ram.stored_bytes()) {
            (bytes, pages) = (bytes + of_device, pages + of_pages);
        }
        bytes += devices.first().map_or(0, |(_, ram)| ram.family().spilled_bytes());
        let files = self.chain.as_ref().map_or(0, Chain::bytes);
        let changed =
            self.last.as_ref().filter(|_| self.may_continue()).and_then(|last| last.estimate_pages(devices));
        let (wrote, bytes) = match changed {
            Some(0) => (Wrote::Nothing, 0),
            Some(changed) => {
                let a_page = if pages == 0 { PAGE_BYTES as u64 } else { bytes.div_ceil(pages) };
                (Wrote::Increment, changed * (a_page + RECORD_BYTES) + FILE_BYTES)
            }
            // Pages not loaded yet are in the files.
            None => (Wrote::Whole, (bytes + pages * RECORD_BYTES).max(files) + FILE_BYTES),
        };
        Ok(Estimate { wrote, bytes, free_bytes })
    }

    /// Saves the content of these devices (of one family) at one moment, with the names under which
    /// to restore them. Snapshots are saved as snapshots. The next whole file contains only the
    /// devices given to its save. If the same devices were saved here before, or restored from
    /// here, only changes are written, unless snapshots were added or removed or a device was
    /// rewound. `progress` receives the bytes processed and the total. `cancelled` is polled
    /// between pieces of up to 2 MiB.
    ///
    /// The file is durable on return. During the save, writers move overwritten pages to a
    /// temporary snapshot.
    ///
    /// An unreadable page is saved as lost: after a restore, reads of it fail as they do now. If a
    /// retry may succeed, the next save retries.
    ///
    /// # Errors
    /// [`KeepError::Save`]: the directory has its old content, or the new file without a durable
    /// name. The next save includes the changes of this one.
    pub fn save(
        &mut self,
        devices: &[(&str, &Ram)],
        cancelled: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<KeptNow, KeepError> {
        saved::plan::check(devices)?;
        let moment = SavePoint::new(devices)?;
        let before = self.replaced();
        match self.save_moment(&moment, cancelled, progress) {
            Ok((now, bases, unread)) => {
                self.last = Some(moment.into_last(bases, &unread));
                if now.wrote == Wrote::Whole {
                    self.next_is_whole = false;
                    self.remove_old(before, unread.is_empty());
                }
                Ok(now)
            }
            Err(error) => {
                moment.put_back();
                // The changes are recorded in new bitmaps, which now include the old ones.
                if let Some(last) = &mut self.last {
                    last.adopt_new_bitmaps(&moment);
                }
                Err(error)
            }
        }
    }

    /// Returns true if an increment may continue the present files.
    fn may_continue(&self) -> bool {
        !self.next_is_whole
            && self.chain.as_ref().is_some_and(|chain| chain.files.len() < FILES_MAX && chain.left_out == 0)
    }

    fn save_moment(
        &mut self,
        moment: &SavePoint,
        cancelled: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(KeptNow, Vec<saved::BaseIdentity>, Unread), KeepError> {
        let last = self.last.as_ref().filter(|_| self.may_continue());
        let changes = last.and_then(|last| Some((last, moment.changes(last)?)));
        let when = moment.when;
        if let (Some((last, changes)), Some(chain)) = (&changes, &self.chain) {
            if moment.is_unchanged(last, changes) {
                let now = KeptNow { wrote: Wrote::Nothing, pages: 0, lost: 0, file_bytes: 0, when };
                return Ok((now, last.identities(), Unread::new()));
            }
            let (generation, number) = (chain.generation, chain.files.len() as u32);
            let continues = chain.files.last().map_or(0, |file| file.salt);
            let (kept, bases) = (moment.record(generation, number, continues), last.identities());
            let (now, unread) = self.publish_file(generation, number, when, cancelled, |writer| {
                Ok(moment.write_changes(writer, (kept, &bases), changes, cancelled, progress)?)
            })?;
            return Ok((now, bases, unread));
        }
        let bases = moment.plan.identify_bases(self.check, cancelled)?;
        let generation = self.dir.next_generation()?;
        let kept = moment.record(generation, 0, 0);
        let (now, unread) = self.publish_file(generation, 0, when, cancelled, |writer| {
            Ok(moment.write_whole(writer, (kept, &bases), cancelled, progress)?)
        })?;
        Ok((now, bases, unread))
    }

    /// Writes a file, publishes it when it is complete and durable, and then updates the chain.
    /// Nothing between these two steps can fail.
    fn publish_file(
        &mut self,
        generation: u64,
        number: u32,
        when: SystemTime,
        cancelled: &dyn Fn() -> bool,
        write: impl FnOnce(Writer<'_>) -> Result<(saved::Saved, Unread), KeepError>,
    ) -> Result<(KeptNow, Unread), KeepError> {
        let path = self.dir.place(generation, number);
        let failed = |source| SaveError::Write { path: path.clone(), source };
        let place = Place::new(&path).map_err(failed)?;
        let unfinished = place.begin(SAVE_PREFIX).map_err(failed)?;
        let writer = Writer::new(unfinished.as_file(), &place.path);
        let salt = writer.salt();
        let (saved::Saved { pages, lost, file_bytes }, unread) = write(writer)?;
        if cancelled() {
            return Err(SaveError::Cancelled.into());
        }
        let file = unfinished.as_file().try_clone().map_err(failed)?;
        let contents = saved::contents(&saved::reader::Reader::from_file(file, &path)?);
        let is_unseen =
            mutants::on(if number == 0 { Mutant::KeptFileUnseen } else { Mutant::IncrementUnseen });
        let durability = place.put(unfinished, MayGo::Nothing).map_err(|source| {
            // An unknown file has this name: start another generation.
            self.next_is_whole |= source.kind() == io::ErrorKind::AlreadyExists && !is_unseen;
            failed(source)
        })?;
        let durability = match durability {
            Durability::Unknown(source) if is_unseen => return Err(failed(source).into()),
            durability => durability,
        };
        let member = ChainFile { path: path.clone(), bytes: file_bytes, salt, when, has_lost: lost > 0 };
        match &mut self.chain {
            Some(chain) if number > 0 => {
                chain.contents = contents;
                chain.files.push(member);
            }
            chain => *chain = Some(Chain { generation, files: vec![member], contents, left_out: 0 }),
        }
        match durability {
            Durability::Durable => self.update_contents(),
            // Only the previous content of the directory is certain to survive a crash.
            Durability::Unknown(_) => self.next_is_whole = true,
        }
        durability.into_result().map_err(failed)?;
        let extent = if number > 0 { Wrote::Increment } else { Wrote::Whole };
        Ok((KeptNow { wrote: extent, pages, lost, file_bytes, when }, unread))
    }

    /// Returns the generation of the present chain, and whether it has lost pages.
    fn replaced(&self) -> Option<(u64, bool)> {
        self.chain.as_ref().map(|chain| (chain.generation, chain.has_lost()))
    }

    /// Removes files replaced by a whole file. If that lacks pages (not `has_all`), keeps the files
    /// that may still have them: the chain `before` it, or files that that one kept.
    fn remove_old(&self, before: Option<(u64, bool)>, has_all: bool) {
        let removed = match (&self.chain, before) {
            (Some(chain), _) if has_all => self.dir.remove_others(chain.generation),
            (Some(_), Some((before, true))) => self.dir.remove(|(generation, _)| generation == before),
            _ => Ok(()),
        };
        if let Err(error) = removed {
            // They only take space; the next removal includes them.
            tracing::warn!("kept devices: cannot remove obsolete files: {error}");
        }
    }

    // ---- merging --------------------------------------------------------------------------------

    /// Returns true if the increments are numerous or large enough to merge.
    pub fn is_merge_due(&self) -> bool {
        self.chain.as_ref().is_some_and(|chain| {
            let Some((whole, increments)) = chain.files.split_first() else { return false };
            let bytes: u64 = increments.iter().map(|file| file.bytes).sum();
            !self.next_is_whole
                && (increments.len() > INCREMENTS_MAX
                    || bytes.saturating_mul(100) > whole.bytes.saturating_mul(INCREMENTS_PERCENT_MAX))
        })
    }

    /// Merges the files into one if that [is due](Self::is_merge_due), and removes them; the
    /// devices are not involved. Returns the bytes of the new file, or `None` if no merge was due.
    /// `progress` receives the bytes copied and the approximate total. `cancelled` is polled every
    /// 256 records.
    ///
    /// # Errors
    /// [`KeepError::Read`]: a file is damaged; the next save writes a whole file.
    /// [`KeepError::Save`]: the new file could not be written, or the merge was cancelled. The old
    /// files are unchanged; if a crash may undo the new file's name, the next save writes a whole
    /// file.
    pub fn merge_if_due(
        &mut self,
        cancelled: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Option<u64>, KeepError> {
        if self.is_merge_due() { self.merge(cancelled, progress).map(Some) } else { Ok(None) }
    }

    /// Merges the files unconditionally; see [`merge_if_due`](Self::merge_if_due).
    ///
    /// # Errors
    /// As [`merge_if_due`](Self::merge_if_due); [`KeepError::Nothing`] if the directory is empty.
    pub fn merge(
        &mut self,
        cancelled: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<u64, KeepError> {
        let before = self.replaced();
        let Some(chain) = &self.chain else { return Err(KeepError::Nothing(self.dir.path.clone())) };
        let generation = self.dir.next_generation()?;
        let when = chain.files.last().map_or(SystemTime::UNIX_EPOCH, |file| file.when);
        let paths: Vec<_> = chain.files.iter().map(|file| file.path.clone()).collect();
        let put = self.publish_file(generation, 0, when, cancelled, |writer| {
            Ok((merge::merge(paths.into_iter(), writer, generation, cancelled, progress)?, Unread::new()))
        });
        if matches!(put, Err(KeepError::Read(_)))
            && let Some(last) = self.last.take()
        {
            last.stop_tracking();
        }
        let (now, _) = put?;
        self.remove_old(before, now.lost == 0);
        Ok(now.file_bytes)
    }

    // ---- restoring ------------------------------------------------------------------------------

    /// Recreates the devices of the directory and returns them with their names. They can be used
    /// at once: missing pages are read from the files until [`Loading`] has loaded them. Pages of
    /// snapshots that their origin overwrote are in memory on return. `bases` are as for
    /// [`restore`](crate::save::restore). The next [`save`](Self::save) of all these devices is an
    /// increment.
    ///
    /// An index of the files, 24 bytes a page, stays in memory until everything is loaded.
    ///
    /// # Errors
    /// [`KeepError::Nothing`] if the directory is empty. [`KeepError::Read`] if the files are
    /// damaged (except data of pages that stay in them), a base is missing or different, a device
    /// cannot be created, or memory is short for snapshots' pages. Devices already created are
    /// removed.
    pub fn restore(
        &mut self,
        family: &Family,
        bases: &[Base],
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(Vec<(String, Ram)>, Loading), KeepError> {
        let Some(chain) = &self.chain else { return Err(KeepError::Nothing(self.dir.path.clone())) };
        let files: Result<Vec<_>, RestoreError> =
            chain.files.iter().enumerate().map(|(number, file)| scan(&file.path, number)).collect();
        let Some(whole) = MergedChain::new(files?) else {
            return Err(KeepError::Nothing(self.dir.path.clone()));
        };
        let (nodes, identities) = (Arc::clone(&whole.nodes), whole.bases.clone());
        let RestoredDevices { devices, loading } = restore::make(whole, family, bases, cancelled)?;
        let below = |number: usize| {
            let at = nodes.iter().position(|node| node.over == Over::Base(number as u32))?;
            if let Lower::Device(device) = devices[at].lower() { Some(device) } else { None }
        };
        let lower: Vec<_> = (0..identities.len()).filter_map(below).collect();
        if let Some(last) = self.last.take() {
            last.stop_tracking();
        }
        self.last = Some(LastSave::of_restored(&nodes, &devices, identities, &lower));
        let named = nodes.iter().zip(devices);
        Ok((named.filter_map(|(node, ram)| Some((node.name.clone()?, ram))).collect(), loading))
    }

    /// Removes all files permanently. Restored devices must be fully loaded; pages that are not are
    /// read from the removed files while the [`Loading`] or the device exists.
    ///
    /// # Errors
    /// Fails if a file cannot be removed.
    pub fn forget(&mut self) -> Result<(), KeepError> {
        if let Some(last) = self.last.take() {
            last.stop_tracking();
        }
        (self.chain, self.kept) = (None, None);
        self.dir.remove(|_| true)
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        if let Some(last) = self.last.take() {
            last.stop_tracking();
        }
    }
}
