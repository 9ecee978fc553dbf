//! Devices whose content is kept in a directory, for the next start of the server.
//!
//! [`Keep::save`] writes what devices of a family hold at one moment: all of it the first time, and
//! what changed since the last save after that. For that it is noted, a bit a page, what changes of a
//! device that was saved here; others pay nothing. [`Keep::merge_if_due`] makes one file of many,
//! without the devices. [`Keep::restore`] makes the devices again: they can be used at once, and read
//! from the files what is not in memory yet, while [`Loading`] puts it there.
//!
//! A file is complete or it is not there, as in [`save`](crate::save); the newest whole one and the
//! increments that continue it are what is restored. The format is in `docs/save-format.md`.
//!
//! Threads and times are the caller's: nothing here does anything by itself.

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

use self::dir::{Chain, Dir, Member};
pub use self::errors::KeepError;
use self::file::scan;
pub use self::load::{Loaded, Loading};
use self::restore::{Made, Whole};
use self::save::{Last, Moment, Unread};
use crate::ram::{Family, Lower, Ram};
use crate::save::format::Over;
use crate::save::writer::Writer;
use crate::save::{self as saved, Base, BaseCheck, Contents, RestoreError, SaveError};
use freestone_core::PAGE_BYTES;
use freestone_core::mutants::{self, Mutant};
use freestone_core::replace::{Durability, MayGo, Place, SAVE_PREFIX};

/// With more increments than this they are [merged](Keep::merge_if_due).
pub const INCREMENTS_MAX: usize = 16;
/// With more than this share of the whole file in increments, in percent, they are merged.
pub const INCREMENTS_PERCENT_MAX: u64 = 50;
/// With so many files, which could not be merged, the next save is a whole one.
const FILES_MAX: usize = 200;
/// Bytes that a page takes in a file beside its data.
const RECORD_BYTES: u64 = 16;
/// Bytes of a file beside its pages, about.
const FILE_BYTES: u64 = 4096;

/// A directory in which devices of a family are kept. While it is open nobody else opens it; it is
/// for one thread at a time.
pub struct Keep {
    dir: Dir,
    check: BaseCheck,
    chain: Option<Chain>,
    kept: Option<Kept>,
    /// What is in the chain, as devices of this process. `None`: nothing of this process is.
    last: Option<Last>,
    /// A crash may undo the last file. So nothing continues the chain: the next save is a whole one, of
    /// a new generation.
    whole_next: bool,
}

/// What is done about files that are damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Damaged {
    /// The directory is not opened. The end of the newest file may be missing: that save was not
    /// completed, and what was saved before is used.
    #[default]
    Refuse,
    /// What was saved before them is used, if there is anything. All but the data of pages is
    /// checked.
    LeaveOut,
}

/// What a directory holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// The devices, and what must be given to restore them. `pages` are those of the newest file.
    pub contents: Contents,
    /// When the devices held that.
    pub when: SystemTime,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// Files beside the whole one.
    pub increments: usize,
    /// Newer files, which cannot be used.
    pub left_out: usize,
}

/// What a save wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrote {
    /// All that the devices hold.
    Whole,
    /// What changed since the save before.
    Increment,
    /// Nothing: the devices hold what they held.
    Nothing,
}

/// A save that is complete and durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptNow {
    /// What was written.
    pub wrote: Wrote,
    /// Pages in the file.
    pub pages: u64,
    /// Pages among them that could not be read.
    pub lost: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// When the devices held that.
    pub when: SystemTime,
}

/// What the next save will need, about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// What it will write. (Something may happen until then that makes it a whole one.)
    pub wrote: Wrote,
    /// Bytes of the file. Old files are removed after the new one is complete.
    pub bytes: u64,
    /// Bytes that may still be written in the directory's file system.
    pub free_bytes: u64,
}

impl Estimate {
    /// Whether there is room for it.
    pub fn fits(&self) -> bool {
        self.bytes <= self.free_bytes
    }
}

impl Keep {
    /// Opens a directory, which is made with the mode 0700 if it is not there. What a crash left of
    /// unfinished files is removed. Bases are identified by samples.
    ///
    /// # Errors
    /// [`KeepError`]: it cannot be used, or is in use; its files are of a newer Freestone, or damaged
    /// where that is seen without their data.
    pub fn open(dir: &Path) -> Result<Self, KeepError> {
        Self::open_with(dir, BaseCheck::default(), Damaged::default())
    }

    /// As [`open`](Self::open): how bases are identified, and what is done about damaged files.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(dir: &Path, check: BaseCheck, damaged: Damaged) -> Result<Self, KeepError> {
        let dir = Dir::open(dir)?;
        let chain = dir.chain(damaged)?;
        let mut keep = Self { dir, check, chain, kept: None, last: None, whole_next: false };
        keep.tell();
        // The process before may have ended before the name of its last file was durable, or before it
        // had removed the old ones.
        if let Err(error) = keep.dir.sync() {
            tracing::warn!("kept devices: the next save is a whole one: {error}");
            keep.whole_next = true;
        } else if keep.chain.as_ref().is_some_and(|chain| chain.left_out == 0 && !chain.has_lost()) {
            keep.remove_old(None, true);
        }
        Ok(keep)
    }

    /// What the directory holds; `None`: nothing.
    pub fn contents(&self) -> Option<&Kept> {
        self.kept.as_ref()
    }

    fn tell(&mut self) {
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

    /// What the next [`save`](Self::save) of these devices will need.
    ///
    /// # Errors
    /// The file system does not say how much is free.
    pub fn estimate(&self, devices: &[(&str, &Ram)]) -> Result<Estimate, KeepError> {
        let free_bytes = self.dir.free_bytes()?;
        let (mut bytes, mut pages) = (0, 0);
        for (of_device, of_pages) in devices.iter().map(|(_, ram)| ram.stored_bytes()) {
            (bytes, pages) = (bytes + of_device, pages + of_pages);
        }
        bytes += devices.first().map_or(0, |(_, ram)| ram.family().spilled_bytes());
        let files = self.chain.as_ref().map_or(0, Chain::bytes);
        let changed = self.last.as_ref().filter(|_| self.may_continue()).and_then(|last| last.about(devices));
        let (wrote, bytes) = match changed {
            Some(0) => (Wrote::Nothing, 0),
            Some(changed) => {
                let a_page = if pages == 0 { PAGE_BYTES as u64 } else { bytes.div_ceil(pages) };
                (Wrote::Increment, changed * (a_page + RECORD_BYTES) + FILE_BYTES)
            }
            // What was not loaded yet is in the files.
            None => (Wrote::Whole, (bytes + pages * RECORD_BYTES).max(files) + FILE_BYTES),
        };
        Ok(Estimate { wrote, bytes, free_bytes })
    }

    /// Saves what these devices hold at one moment, with the names under which they are restored; a
    /// snapshot as it is. They are of one family. What is not given is in the next whole save no
    /// more. Where the same devices were saved here before (or restored from here) only what changed
    /// since is written, unless snapshots have come or gone, or a device was rewound. `progress` is
    /// given bytes that were looked through, and all. `cancelled` is asked between pieces of up to
    /// 2 MiB.
    ///
    /// When it returns the file is durable. While it writes, the devices' writers leave what they
    /// overwrite to a snapshot, which is gone afterwards.
    ///
    /// A page that cannot be read is saved as lost: reads of it fail after it is restored, as they do
    /// now. Where another try may succeed the next save makes it.
    ///
    /// # Errors
    /// [`KeepError::Save`]: the directory holds what it held, or the new file without a durable name.
    /// The next save has what this one would have had.
    pub fn save(
        &mut self,
        devices: &[(&str, &Ram)],
        cancelled: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<KeptNow, KeepError> {
        saved::plan::check(devices)?;
        let moment = Moment::new(devices)?;
        let before = self.replaced();
        match self.save_moment(&moment, cancelled, progress) {
            Ok((now, bases, unread)) => {
                self.last = Some(moment.into_last(bases, &unread));
                if now.wrote == Wrote::Whole {
                    self.whole_next = false;
                    self.remove_old(before, unread.is_empty());
                }
                Ok(now)
            }
            Err(error) => {
                moment.put_back();
                // From now on it is noted elsewhere what changes; that has all that was noted before.
                if let Some(last) = &mut self.last {
                    last.goes_on(&moment);
                }
                Err(error)
            }
        }
    }

    /// Whether an increment may come behind the present files.
    fn may_continue(&self) -> bool {
        !self.whole_next
            && self.chain.as_ref().is_some_and(|chain| chain.files.len() < FILES_MAX && chain.left_out == 0)
    }

    fn save_moment(
        &mut self,
        moment: &Moment,
        cancelled: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(KeptNow, Vec<saved::BaseIdentity>, Unread), KeepError> {
        let last = self.last.as_ref().filter(|_| self.may_continue());
        let changes = last.and_then(|last| Some((last, moment.changes(last)?)));
        let when = moment.when;
        if let (Some((last, changes)), Some(chain)) = (&changes, &self.chain) {
            if moment.is_as(last, changes) {
                let now = KeptNow { wrote: Wrote::Nothing, pages: 0, lost: 0, file_bytes: 0, when };
                return Ok((now, last.identities(), Unread::new()));
            }
            let (generation, number) = (chain.generation, chain.files.len() as u32);
            let continues = chain.files.last().map_or(0, |file| file.salt);
            let (kept, bases) = (moment.record(generation, number, continues), last.identities());
            let (now, unread) = self.put(generation, number, when, cancelled, |writer| {
                Ok(moment.write_changes(writer, (kept, &bases), changes, cancelled, progress)?)
            })?;
            return Ok((now, bases, unread));
        }
        let bases = moment.plan.identify_bases(self.check, cancelled)?;
        let generation = self.dir.next_generation()?;
        let kept = moment.record(generation, 0, 0);
        let (now, unread) = self.put(generation, 0, when, cancelled, |writer| {
            Ok(moment.write_whole(writer, (kept, &bases), cancelled, progress)?)
        })?;
        Ok((now, bases, unread))
    }

    /// Writes a file, puts it in its place when it is complete and durable, and has the chain be what
    /// the directory holds then. Nothing that can fail comes between the two.
    fn put(
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
        let contents = saved::contents(&saved::reader::Reader::of(file, &path)?);
        let is_unseen =
            mutants::on(if number == 0 { Mutant::KeptFileUnseen } else { Mutant::IncrementUnseen });
        let durability = place.put(unfinished, MayGo::Nothing).map_err(|source| {
            // The name is of a file that nobody knows of: another generation has none like it.
            self.whole_next |= source.kind() == io::ErrorKind::AlreadyExists && !is_unseen;
            failed(source)
        })?;
        let durability = match durability {
            Durability::Unknown(source) if is_unseen => return Err(failed(source).into()),
            durability => durability,
        };
        let member = Member { path: path.clone(), bytes: file_bytes, salt, when, has_lost: lost > 0 };
        match &mut self.chain {
            Some(chain) if number > 0 => {
                chain.contents = contents;
                chain.files.push(member);
            }
            chain => *chain = Some(Chain { generation, files: vec![member], contents, left_out: 0 }),
        }
        match durability {
            Durability::Durable => self.tell(),
            // What the directory holds for sure is what it held.
            Durability::Unknown(_) => self.whole_next = true,
        }
        durability.into_result().map_err(failed)?;
        let extent = if number > 0 { Wrote::Increment } else { Wrote::Whole };
        Ok((KeptNow { wrote: extent, pages, lost, file_bytes, when }, unread))
    }

    /// The generation of the present chain, and whether it has pages as lost.
    fn replaced(&self) -> Option<(u64, bool)> {
        self.chain.as_ref().map(|chain| (chain.generation, chain.has_lost()))
    }

    /// Removes what a whole file has replaced. Unless it `has_all` pages, the files stay that may still have
    /// those that could not be read: the chain `before` it, or what that one has left.
    fn remove_old(&self, before: Option<(u64, bool)>, has_all: bool) {
        let removed = match (&self.chain, before) {
            (Some(chain), _) if has_all => self.dir.remove_others(chain.generation),
            (Some(_), Some((before, true))) => self.dir.remove(|(generation, _)| generation == before),
            _ => Ok(()),
        };
        if let Err(error) = removed {
            // They do no harm but for the room that they take: the next one removes them.
            tracing::warn!("kept devices: files that are not needed any more stay: {error}");
        }
    }

    // ---- merging --------------------------------------------------------------------------------

    /// Whether increments are so many, or so large, that they should be merged.
    pub fn is_merge_due(&self) -> bool {
        self.chain.as_ref().is_some_and(|chain| {
            let Some((whole, increments)) = chain.files.split_first() else { return false };
            let bytes: u64 = increments.iter().map(|file| file.bytes).sum();
            !self.whole_next
                && (increments.len() > INCREMENTS_MAX
                    || bytes.saturating_mul(100) > whole.bytes.saturating_mul(INCREMENTS_PERCENT_MAX))
        })
    }

    /// Merges the files into one where that [is due](Self::is_merge_due), and then removes them; the
    /// devices have no part in it. Returns the bytes of the new file, `None`: it was not due.
    /// `progress` is given bytes that were copied, and about how many there are. `cancelled` is asked
    /// after every 256 records.
    ///
    /// # Errors
    /// [`KeepError::Read`]: a file is damaged; the next save is a whole one then.
    /// [`KeepError::Save`]: the new file could not be written, or it was cancelled. The old files are
    /// as they were; if the new one has a name that a crash may undo, the next save is a whole one.
    pub fn merge_if_due(
        &mut self,
        cancelled: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Option<u64>, KeepError> {
        if self.is_merge_due() { self.merge(cancelled, progress).map(Some) } else { Ok(None) }
    }

    /// As [`merge_if_due`](Self::merge_if_due), due or not.
    ///
    /// # Errors
    /// As there; [`KeepError::Nothing`].
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
        let put = self.put(generation, 0, when, cancelled, |writer| {
            Ok((merge::merge(paths.into_iter(), writer, generation, cancelled, progress)?, Unread::new()))
        });
        if matches!(put, Err(KeepError::Read(_)))
            && let Some(last) = self.last.take()
        {
            last.end();
        }
        let (now, _) = put?;
        self.remove_old(before, now.lost == 0);
        Ok(now.file_bytes)
    }

    // ---- restoring ------------------------------------------------------------------------------

    /// Makes the devices that the directory holds, and returns them with their names. They can be
    /// used at once: what is not in memory is read from the files until the [`Loading`] has put it
    /// there. Pages that a snapshot has and its origin overwrote are in memory when this returns.
    /// `bases` are as for [`restore`](crate::save::restore). The next [`save`](Self::save) of all of
    /// these devices writes what changed.
    ///
    /// An index of the files stays in memory until all is loaded, 24 bytes a page.
    ///
    /// # Errors
    /// [`KeepError::Nothing`]; [`KeepError::Read`]: the files are damaged where that is seen without
    /// the data of pages that stay in them, a base is missing or another one, a device cannot be
    /// made, or there is no room for a snapshot's pages. What was made is gone again.
    pub fn restore(
        &mut self,
        family: &Family,
        bases: &[Base],
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(Vec<(String, Ram)>, Loading), KeepError> {
        let Some(chain) = &self.chain else { return Err(KeepError::Nothing(self.dir.path.clone())) };
        let files: Result<Vec<_>, RestoreError> =
            chain.files.iter().enumerate().map(|(number, file)| scan(&file.path, number)).collect();
        let Some(whole) = Whole::new(files?) else {
            return Err(KeepError::Nothing(self.dir.path.clone()));
        };
        let (nodes, identities) = (Arc::clone(&whole.nodes), whole.bases.clone());
        let Made { devices, loading } = restore::make(whole, family, bases, cancelled)?;
        let below = |number: usize| {
            let at = nodes.iter().position(|node| node.over == Over::Base(number as u32))?;
            if let Lower::Device(device) = devices[at].lower() { Some(device) } else { None }
        };
        let lower: Vec<_> = (0..identities.len()).filter_map(below).collect();
        if let Some(last) = self.last.take() {
            last.end();
        }
        self.last = Some(Last::of_restored(&nodes, &devices, identities, &lower));
        let named = nodes.iter().zip(devices);
        Ok((named.filter_map(|(node, ram)| Some((node.name.clone()?, ram))).collect(), loading))
    }

    /// Removes all files, for good. Devices that were restored from them must have been loaded;
    /// what was not is read from the removed files as long as the [`Loading`] or the device is there.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn forget(&mut self) -> Result<(), KeepError> {
        if let Some(last) = self.last.take() {
            last.end();
        }
        (self.chain, self.kept) = (None, None);
        self.dir.remove(|_| true)
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        if let Some(last) = self.last.take() {
            last.end();
        }
    }
}
