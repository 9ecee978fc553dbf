//! The content of devices, kept in a directory across restarts of the server.
//!
//! [`Keep::save`] writes the content of a family's devices at one moment (a family is a base and
//! its forks, which share memory). The first save writes a whole file; later saves write increments
//! with the changes since the previous one. For this, changed pages of saved devices are recorded
//! in a bitmap; other devices have no overhead. [`Keep::merge_if_due`] merges the files without
//! using the devices. [`Keep::restore`] recreates the devices. Restored devices can be used at once
//! and read missing pages from the files, while [`BackgroundLoad`] loads these pages into memory.
//!
//! A file appears atomically when it is complete, as in [`save`](crate::save). A restore uses the
//! newest whole file and the increments that continue it. `docs/reference/save-format.md` describes
//! the format.
//!
//! The module has no threads or timers: the caller decides when to save, merge and load.

mod dir;
mod errors;
mod file;
mod index;
mod load;
mod merge;
mod report;
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
pub use self::load::{BackgroundLoad, LoadOutcome};
pub use self::report::{DamagePolicy, KeepContents, KeepReport, SaveEstimate, SaveKind};
use self::restore::{MergedChain, RestoredDevices};
use self::save::{LastSave, SavePoint, UnreadablePages};
use crate::save::format::NodeParent;
use crate::save::writer::Writer;
use crate::save::{self as saved, Base, BaseCheck, RestoreError, SaveError};
use freestone_core::PAGE_BYTES;
use freestone_core::mutants::{self, Mutant};
use freestone_core::replace::{Durability, ReplaceCheck, ReplaceTarget, SAVE_PREFIX};
use freestone_ram::ram::{Family, ParentDevice, Ram};

/// Number of increments above which [`Keep::merge_if_due`] merges the files.
pub const INCREMENTS_MAX: usize = 16;
/// Size of all increments, in percent of the whole file, above which the files are merged.
pub const INCREMENTS_PERCENT_MAX: u64 = 50;
/// Number of unmerged files at which the next save writes a whole file instead of an increment.
const FILES_MAX: usize = 200;
/// Size of a page's record in a file without page data, in bytes; used for estimates.
const RECORD_BYTES: u64 = 16;
/// Approximate size of a file without pages, in bytes; used for estimates.
const FILE_BYTES: u64 = 4096;

/// A directory with kept devices, locked against other processes and used by one thread at a time.
pub struct Keep {
    dir: Dir,
    check: BaseCheck,
    chain: Option<Chain>,
    kept: Option<KeepContents>,
    /// State of the newest save, which links its nodes to live devices; `None` if this process has
    /// none of the saved devices.
    last: Option<LastSave>,
    /// True if a crash may undo the last file. The next save then starts a new generation with a
    /// whole file.
    next_is_whole: bool,
}

impl Keep {
    /// Opens a directory, creates it with mode 0700 if necessary, and removes unfinished files of a
    /// crash. Bases are identified by samples of their content.
    ///
    /// # Errors
    /// Fails if the directory is unusable or in use, or if a newer version of Freestone wrote the
    /// files. Also fails if the files are visibly damaged (page data is not read).
    pub fn open(dir: &Path) -> Result<Self, KeepError> {
        Self::open_with(dir, BaseCheck::default(), DamagePolicy::default())
    }

    /// Opens a directory like [`open`](Self::open), with a choice of base identification and of the
    /// policy for damaged files.
    ///
    /// # Errors
    /// Fails like [`open`](Self::open). With [`DamagePolicy::UseOlder`], damaged files do not cause
    /// an error.
    pub fn open_with(dir: &Path, check: BaseCheck, damaged: DamagePolicy) -> Result<Self, KeepError> {
        let dir = Dir::open(dir)?;
        let chain = dir.chain(damaged)?;
        let mut keep = Self { dir, check, chain, kept: None, last: None, next_is_whole: false };
        keep.update_contents();
        // The previous process may have ended before the last file's name was durable, or before it
        // removed the old files.
        if let Err(error) = keep.dir.sync() {
            tracing::warn!("kept devices: the next save will be a whole file: {error}");
            keep.next_is_whole = true;
        } else if keep.chain.as_ref().is_some_and(|chain| chain.unusable_files == 0 && !chain.has_lost()) {
            keep.remove_old(None, true);
        }
        Ok(keep)
    }

    /// Returns a description of the kept devices; `None` if the directory does not contain any.
    pub fn contents(&self) -> Option<&KeepContents> {
        self.kept.as_ref()
    }

    fn update_contents(&mut self) {
        self.kept = self.chain.as_ref().and_then(|chain| {
            Some(KeepContents {
                contents: chain.contents.clone(),
                saved_at: chain.files.last()?.saved_at,
                file_bytes: chain.bytes(),
                increments: chain.files.len() - 1,
                unusable_files: chain.unusable_files,
            })
        });
    }

    // ---- saving ---------------------------------------------------------------------------------

    /// Returns an estimate of the next [`save`](Self::save) of these devices.
    ///
    /// # Errors
    /// Fails if the file system does not report the number of free bytes.
    pub fn estimate(&self, devices: &[(&str, &Ram)]) -> Result<SaveEstimate, KeepError> {
        let free_bytes = self.dir.free_bytes()?;
        let (mut bytes, mut pages) = (0, 0);
        for stat in devices.iter().map(|(_, ram)| ram.mm_stat()) {
            bytes += stat.compr_data_size;
            pages += stat.orig_data_size / PAGE_BYTES as u64;
        }
        bytes += devices.first().map_or(0, |(_, ram)| ram.backing().map_or(0, |backing| backing.live_bytes));
        let files = self.chain.as_ref().map_or(0, Chain::bytes);
        let changed =
            self.last.as_ref().filter(|_| self.may_continue()).and_then(|last| last.estimate_pages(devices));
        let (wrote, bytes) = match changed {
            Some(0) => (SaveKind::Unchanged, 0),
            Some(changed) => {
                let a_page = if pages == 0 { PAGE_BYTES as u64 } else { bytes.div_ceil(pages) };
                (SaveKind::Increment, changed * (a_page + RECORD_BYTES) + FILE_BYTES)
            }
            // Pages that are not loaded yet are only in the files, so the new file may be as large
            // as those.
            None => (SaveKind::Whole, (bytes + pages * RECORD_BYTES).max(files) + FILE_BYTES),
        };
        Ok(SaveEstimate { kind: wrote, bytes, free_bytes })
    }

    /// Saves the content of these devices (of one family) at one moment, with the names under which
    /// to restore them. Snapshots are saved as snapshots. The next whole file contains only the
    /// devices given to its save.
    ///
    /// If the same devices were saved in this directory before, or restored from it, only changes
    /// are written. A whole file is written if snapshots were added or removed, or if a device was
    /// rewound. `progress` receives the bytes processed and the total. `cancelled` is polled
    /// between pieces of up to 2 MiB.
    ///
    /// The file is durable on return. During the save, writers preserve overwritten pages in a
    /// temporary snapshot.
    ///
    /// An unreadable page is saved as lost: after a restore, reads of that page fail as they do
    /// now. If reading it again may succeed, the next save tries again.
    ///
    /// # Errors
    /// [`KeepError::Save`]: the directory has its old content, or the new file under a name that
    /// may not be durable. The next save includes the changes of the failed one.
    pub fn save(
        &mut self,
        devices: &[(&str, &Ram)],
        cancelled: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<KeepReport, KeepError> {
        saved::plan::check(devices)?;
        let moment = SavePoint::new(devices)?;
        let before = self.replaced();
        match self.save_moment(&moment, cancelled, progress) {
            Ok((now, bases, unread)) => {
                self.last = Some(moment.into_last(bases, &unread));
                if now.kind == SaveKind::Whole {
                    self.next_is_whole = false;
                    self.remove_old(before, unread.is_empty());
                }
                Ok(now)
            }
            Err(error) => {
                moment.put_back();
                // The next changes are recorded in new bitmaps, into which the old ones were
                // merged.
                if let Some(last) = &mut self.last {
                    last.adopt_new_bitmaps(&moment);
                }
                Err(error)
            }
        }
    }

    /// Returns true if an increment can continue the files of the present chain.
    fn may_continue(&self) -> bool {
        !self.next_is_whole
            && self
                .chain
                .as_ref()
                .is_some_and(|chain| chain.files.len() < FILES_MAX && chain.unusable_files == 0)
    }

    fn save_moment(
        &mut self,
        moment: &SavePoint,
        cancelled: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(KeepReport, Vec<saved::BaseIdentity>, UnreadablePages), KeepError> {
        let last = self.last.as_ref().filter(|_| self.may_continue());
        let changes = last.and_then(|last| Some((last, moment.changes(last)?)));
        let saved_at = moment.saved_at;
        if let (Some((last, changes)), Some(chain)) = (&changes, &self.chain) {
            if moment.is_unchanged(last, changes) {
                let now =
                    KeepReport { kind: SaveKind::Unchanged, pages: 0, lost: 0, file_bytes: 0, saved_at };
                return Ok((now, last.identities(), UnreadablePages::new()));
            }
            let (generation, number) = (chain.generation, chain.files.len() as u32);
            let continues = chain.files.last().map_or(0, |file| file.salt);
            let (kept, bases) = (moment.record(generation, number, continues), last.identities());
            let (now, unread) = self.publish_file(generation, number, saved_at, cancelled, |writer| {
                Ok(moment.write_changes(writer, (kept, &bases), changes, cancelled, progress)?)
            })?;
            return Ok((now, bases, unread));
        }
        let bases = moment.plan.identify_bases(self.check, cancelled)?;
        let generation = self.dir.next_generation()?;
        let kept = moment.record(generation, 0, 0);
        let (now, unread) = self.publish_file(generation, 0, saved_at, cancelled, |writer| {
            Ok(moment.write_whole(writer, (kept, &bases), cancelled, progress)?)
        })?;
        Ok((now, bases, unread))
    }

    /// Writes a file, publishes it when it is complete and durable, and then updates the chain. No
    /// step between publishing and updating can fail.
    fn publish_file(
        &mut self,
        generation: u64,
        number: u32,
        saved_at: SystemTime,
        cancelled: &dyn Fn() -> bool,
        write: impl FnOnce(Writer<'_>) -> Result<(saved::SaveReport, UnreadablePages), KeepError>,
    ) -> Result<(KeepReport, UnreadablePages), KeepError> {
        let path = self.dir.place(generation, number);
        let failed = |source| SaveError::Write { path: path.clone(), source };
        let place = ReplaceTarget::new(&path).map_err(failed)?;
        let unfinished = place.begin(SAVE_PREFIX).map_err(failed)?;
        let writer = Writer::new(unfinished.as_file(), &place.path);
        let salt = writer.salt();
        let (saved::SaveReport { pages, lost, file_bytes }, unread) = write(writer)?;
        if cancelled() {
            return Err(SaveError::Cancelled.into());
        }
        let file = unfinished.as_file().try_clone().map_err(failed)?;
        let contents = saved::contents(&saved::reader::Reader::from_file(file, &path)?);
        let is_unseen =
            mutants::on(if number == 0 { Mutant::KeptFileUnseen } else { Mutant::IncrementUnseen });
        let durability = place.put(unfinished, ReplaceCheck::Nothing).map_err(|source| {
            // Another file with this name exists: let the next save start another generation.
            self.next_is_whole |= source.kind() == io::ErrorKind::AlreadyExists && !is_unseen;
            failed(source)
        })?;
        let durability = match durability {
            Durability::Unknown(source) if is_unseen => return Err(failed(source).into()),
            durability => durability,
        };
        let member = ChainFile { path: path.clone(), bytes: file_bytes, salt, saved_at, has_lost: lost > 0 };
        match &mut self.chain {
            Some(chain) if number > 0 => {
                chain.contents = contents;
                chain.files.push(member);
            }
            chain => *chain = Some(Chain { generation, files: vec![member], contents, unusable_files: 0 }),
        }
        match durability {
            Durability::Durable => self.update_contents(),
            // Only the previous content of the directory is certain to survive a crash.
            Durability::Unknown(_) => self.next_is_whole = true,
        }
        durability.into_result().map_err(failed)?;
        let extent = if number > 0 { SaveKind::Increment } else { SaveKind::Whole };
        Ok((KeepReport { kind: extent, pages, lost, file_bytes, saved_at }, unread))
    }

    /// Returns the generation of the present chain, and whether it contains lost pages; `None`
    /// without a chain.
    fn replaced(&self) -> Option<(u64, bool)> {
        self.chain.as_ref().map(|chain| (chain.generation, chain.has_lost()))
    }

    /// Removes the files that a new whole file replaces. If the new file lacks pages (not
    /// `has_all`), keeps older files that may still have these pages. Such files are the replaced
    /// chain `before`, or files that were kept beside it because it had lost pages.
    fn remove_old(&self, before: Option<(u64, bool)>, has_all: bool) {
        let removed = match (&self.chain, before) {
            (Some(chain), _) if has_all => self.dir.remove_others(chain.generation),
            (Some(_), Some((before, true))) => self.dir.remove(|(generation, _)| generation == before),
            _ => Ok(()),
        };
        if let Err(error) = removed {
            // The obsolete files only take space, and the next removal includes them.
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

    /// Merges the files into one whole file if a merge [is due](Self::is_merge_due), and removes
    /// the old files. The devices are not involved. Returns the size of the new file in bytes, or
    /// `None` if no merge was due. `progress` receives the bytes copied and the approximate total.
    /// `cancelled` is polled every 256 records.
    ///
    /// # Errors
    /// [`KeepError::Read`]: a file is damaged; the next save writes a whole file.
    /// [`KeepError::Save`]: the new file could not be written, or the merge was cancelled. The old
    /// files are unchanged. If a crash may undo the new file's name, the next save writes a whole
    /// file.
    pub fn merge_if_due(
        &mut self,
        cancelled: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Option<u64>, KeepError> {
        if self.is_merge_due() { self.merge(cancelled, progress).map(Some) } else { Ok(None) }
    }

    /// Merges the files even if no merge is due, and returns the size of the new file in bytes; see
    /// [`merge_if_due`](Self::merge_if_due).
    ///
    /// # Errors
    /// As [`merge_if_due`](Self::merge_if_due); [`KeepError::Empty`] if the directory is empty.
    pub fn merge(
        &mut self,
        cancelled: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<u64, KeepError> {
        let before = self.replaced();
        let Some(chain) = &self.chain else { return Err(KeepError::Empty(self.dir.path.clone())) };
        let generation = self.dir.next_generation()?;
        let saved_at = chain.files.last().map_or(SystemTime::UNIX_EPOCH, |file| file.saved_at);
        let paths: Vec<_> = chain.files.iter().map(|file| file.path.clone()).collect();
        let put = self.publish_file(generation, 0, saved_at, cancelled, |writer| {
            Ok((
                merge::merge(paths.into_iter(), writer, generation, cancelled, progress)?,
                UnreadablePages::new(),
            ))
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

    /// Recreates the devices of the directory and returns them with their names. The devices can be
    /// used at once: missing pages are read from the files until [`BackgroundLoad`] has loaded
    /// them. Snapshot pages that the origin overwrote are in memory on return. `bases` are as for
    /// [`restore`](crate::save::restore). The next [`save`](Self::save) of all these devices is an
    /// increment.
    ///
    /// An index of the files, 24 bytes per page, stays in memory until everything is loaded.
    ///
    /// # Errors
    /// [`KeepError::Empty`] if the directory is empty. [`KeepError::Read`] if the files are damaged
    /// (except data of pages that stay in the files), or a base is missing or different.
    /// [`KeepError::Read`] also if a device cannot be created, or memory is short for the pages of
    /// snapshots. Devices already created are removed.
    pub fn restore(
        &mut self,
        family: &Family,
        bases: &[Base],
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(Vec<(String, Ram)>, BackgroundLoad), KeepError> {
        let Some(chain) = &self.chain else { return Err(KeepError::Empty(self.dir.path.clone())) };
        let files: Result<Vec<_>, RestoreError> =
            chain.files.iter().enumerate().map(|(number, file)| scan(&file.path, number)).collect();
        let Some(whole) = MergedChain::new(files?) else {
            return Err(KeepError::Empty(self.dir.path.clone()));
        };
        let (nodes, identities) = (Arc::clone(&whole.nodes), whole.bases.clone());
        let RestoredDevices { devices, loading } = restore::make(whole, family, bases, cancelled)?;
        let below = |number: usize| {
            let at = nodes.iter().position(|node| node.over == NodeParent::Base(number as u32))?;
            if let ParentDevice::Device(device) = devices[at].parent_device() { Some(device) } else { None }
        };
        let lower: Vec<_> = (0..identities.len()).filter_map(below).collect();
        if let Some(last) = self.last.take() {
            last.stop_tracking();
        }
        self.last = Some(LastSave::of_restored(&nodes, &devices, identities, &lower));
        let named = nodes.iter().zip(devices);
        Ok((named.filter_map(|(node, ram)| Some((node.name.clone()?, ram))).collect(), loading))
    }

    /// Removes all files permanently. Restored devices should be fully loaded: while the
    /// [`BackgroundLoad`] or the device exists, pages not loaded yet are read from the removed
    /// files.
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
