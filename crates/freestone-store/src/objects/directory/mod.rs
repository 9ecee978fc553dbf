//! Object storage in a local directory: each object is a file.
//!
//! Writes are durable when they return. A file gets its final name only when it is complete, so readers never
//! see a partial object.
//!
//! Conditional writes and deletions hold an exclusive lock on the file [`LOCK`] of the directory; other
//! writes and deletions hold a shared lock. Listings hold the exclusive lock, because `readdir` may omit a
//! name that `rename` replaces meanwhile.
//!
//! Lock order: [`TURN`], [`LOCK`]. A thread that waits for [`LOCK`] holds [`TURN`], so a sequence of shared
//! locks cannot starve an exclusive one.

#[cfg(test)]
mod tests;

use crate::rt::sync::atomic::{AtomicU64, Ordering};
use crate::rt::thread;
use crate::rt::time::Duration;
use std::fs::{self, File, Metadata};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Once;

use freestone_core::file_size_limit::WriteErrorText;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::{
    CallLimits, Fault, Head, KEY_BYTES_MAX, ListEntry, Objects, Read, Result, Version, WriteCondition,
};

/// First character of the names of files that are not objects.
const HIDDEN: char = '.';
/// Name of the file that is locked during writes, deletions and listings.
const LOCK: &str = ".lock";
/// Name of the file that is locked while waiting for [`LOCK`].
const TURN: &str = ".turn";
/// Name of the directory of incomplete files.
const UNFINISHED: &str = ".unfinished";
/// Age after which an incomplete file is treated as abandoned by its writer, and deleted.
const LEFT_AFTER: Duration = Duration::from_secs(24 * 3600);
/// Pause after the first attempt to lock a file. Each later pause is twice as long, up to `LOCK_PAUSE_MAX`.
const LOCK_PAUSE_MIN: Duration = Duration::from_micros(50);
/// Longest pause between attempts to lock a file.
const LOCK_PAUSE_MAX: Duration = Duration::from_millis(5);

/// Object storage in a local directory.
#[derive(Debug)]
pub struct Directory {
    root: PathBuf,
    url: String,
    next: AtomicU64,
    cleanup: Once,
}

impl Directory {
    /// Uses the directory `root` as object storage. The first write creates the directory if necessary.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        let url = format!("file://{}", root.display());
        Self { root, url, next: AtomicU64::new(0), cleanup: Once::new() }
    }

    fn path(&self, key: &str) -> Result<PathBuf> {
        let is_part = |part: &str| !part.is_empty() && !part.starts_with(HIDDEN) && !part.contains('\0');
        if key.len() > KEY_BYTES_MAX || !key.split('/').all(is_part) {
            return Err(Fault::Other(format!("{key}: invalid object key for a directory")));
        }
        Ok(self.root.join(key))
    }

    /// Locks the directory for other threads and processes until the returned file is dropped.
    fn lock(&self, exclusive: bool, limits: CallLimits<'_>) -> Result<File> {
        make_dir(&self.root.join(UNFINISHED))?;
        let _turn = self.lock_file(TURN, exclusive, limits)?;
        self.lock_file(LOCK, exclusive, limits)
    }

    fn lock_file(&self, name: &str, exclusive: bool, limits: CallLimits<'_>) -> Result<File> {
        let path = self.root.join(name);
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(|e| io_fault(&path, &e))?;
        let operation = if exclusive {
            FlockOperation::NonBlockingLockExclusive
        } else {
            FlockOperation::NonBlockingLockShared
        };
        let mut pause = LOCK_PAUSE_MIN;
        loop {
            match flock(&file, operation) {
                Ok(()) => return Ok(file),
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(errno) => return Err(io_fault(&path, &errno.into())),
            }
            limits.check()?;
            thread::sleep(pause);
            pause = LOCK_PAUSE_MAX.min(pause * 2);
        }
    }

    /// Removes incomplete files that are older than [`LEFT_AFTER`], whose writers were killed.
    fn remove_abandoned_files(&self) {
        let is_old =
            |meta: &Metadata| meta.modified().is_ok_and(|at| at.elapsed().is_ok_and(|age| age > LEFT_AFTER));
        for entry in fs::read_dir(self.root.join(UNFINISHED)).into_iter().flatten().flatten() {
            if entry.metadata().is_ok_and(|meta| is_old(&meta)) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Returns false if the directory does not exist because no object was written yet.
    fn exists(&self) -> Result<bool> {
        self.root.try_exists().map_err(|e| io_fault(&self.root, &e))
    }

    /// Writes a complete file in the directory of incomplete files. Returns the path of the file and its
    /// version.
    fn write_unfinished(&self, bytes: &[u8]) -> Result<(Unfinished, Version)> {
        self.cleanup.call_once(|| self.remove_abandoned_files());
        // Relaxed: the numbers in file names only have to differ.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let id = crate::rt::unique_id().simple();
        let path = self.root.join(UNFINISHED).join(format!("{}-{number}-{id}", process::id()));
        let made = File::options().create_new(true).write(true).open(&path);
        let mut file = made.map_err(|e| io_fault(&path, &e))?;
        let path = Unfinished(path);
        let written = file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| file.metadata());
        let meta = written.map_err(|e| io_fault(&path.0, &e))?;
        Ok((path, version(&meta)))
    }
}

/// Path of an incomplete file, which is removed on drop unless it was renamed.
struct Unfinished(PathBuf);

impl Drop for Unfinished {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl Objects for Directory {
    fn url(&self) -> &str {
        &self.url
    }

    fn get(&self, key: &str, part: Option<Range<u64>>, most: u64, limits: CallLimits<'_>) -> Result<Read> {
        limits.check()?;
        let path = self.path(key)?;
        let failed = |e: io::Error| io_fault(&path, &e);
        let mut file = File::open(&path).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        if !meta.is_file() {
            return Err(Fault::NotFound);
        }
        let part = part.unwrap_or(0..meta.len());
        let bytes = part.end.min(meta.len()).saturating_sub(part.start);
        if bytes > most {
            return Err(Fault::TooLong(most));
        }
        let mut read = Vec::with_capacity(bytes as usize);
        file.seek(SeekFrom::Start(part.start)).map_err(failed)?;
        file.take(bytes).read_to_end(&mut read).map_err(failed)?;
        Ok(Read { bytes: read, version: Some(version(&meta)) })
    }

    fn put(
        &self,
        key: &str,
        bytes: &[u8],
        condition: WriteCondition<'_>,
        limits: CallLimits<'_>,
    ) -> Result<Option<Version>> {
        let path = self.path(key)?;
        let failed = |e: io::Error| io_fault(&path, &e);
        let dir = path.parent().unwrap_or(&self.root);
        let _lock = self.lock(matches!(condition, WriteCondition::Unchanged(_)), limits)?;
        make_dir(dir)?;
        let (unfinished, written) = self.write_unfinished(bytes)?;
        // The directory is opened before the rename, so that after the rename only the flush can fail.
        let opened = open_dir(dir)?;
        match condition {
            WriteCondition::Always => fs::rename(&unfinished.0, &path).map_err(failed)?,
            WriteCondition::Absent => match fs::hard_link(&unfinished.0, &path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(Fault::Condition),
                linked => linked.map_err(failed)?,
            },
            WriteCondition::Unchanged(read) => {
                check_version(&path, read)?;
                fs::rename(&unfinished.0, &path).map_err(failed)?;
            }
        }
        sync_dir(dir, opened)?;
        Ok(Some(written))
    }

    fn head(&self, key: &str, limits: CallLimits<'_>) -> Result<Head> {
        limits.check()?;
        let path = self.path(key)?;
        let meta = fs::metadata(&path).map_err(|e| io_fault(&path, &e))?;
        if !meta.is_file() {
            return Err(Fault::NotFound);
        }
        let modified = meta.modified().map_err(|e| io_fault(&path, &e))?;
        Ok(Head { bytes: meta.len(), modified, version: Some(version(&meta)) })
    }

    fn list(
        &self,
        prefix: &str,
        each: &mut dyn FnMut(ListEntry) -> bool,
        limits: CallLimits<'_>,
    ) -> Result<()> {
        let start = match prefix.strip_suffix('/') {
            None => self.root.clone(),
            Some(prefix) => self.path(prefix)?,
        };
        if !self.exists()? {
            return Ok(());
        }
        let _lock = match self.lock(true, limits) {
            // Without write permission, the listing takes no lock and may be incomplete. An incomplete
            // listing is harmless, as this user cannot delete objects either.
            Err(Fault::Denied(_)) => None,
            lock => Some(lock?),
        };
        let mut dirs = vec![(start, prefix.to_owned())];
        while let Some((dir, prefix)) = dirs.pop() {
            limits.check()?;
            let entries = match fs::read_dir(&dir) {
                Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                    continue;
                }
                entries => entries.map_err(|e| io_fault(&dir, &e))?,
            };
            for entry in entries {
                let entry = entry.map_err(|e| io_fault(&dir, &e))?;
                let Ok(name) = entry.file_name().into_string() else { continue };
                if name.starts_with(HIDDEN) {
                    continue;
                }
                let meta = match entry.metadata() {
                    // Another process deleted the file after it was listed.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                    meta => meta.map_err(|e| io_fault(&entry.path(), &e))?,
                };
                let key = format!("{prefix}{name}");
                if meta.is_dir() {
                    dirs.push((entry.path(), format!("{key}/")));
                    continue;
                }
                let modified = meta.modified().map_err(|e| io_fault(&entry.path(), &e))?;
                if meta.is_file() && !each(ListEntry { key, bytes: meta.len(), modified }) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn delete(&self, key: &str, limits: CallLimits<'_>) -> Result<()> {
        let path = self.path(key)?;
        if !self.exists()? {
            return Ok(());
        }
        let _lock = self.lock(false, limits)?;
        match fs::remove_file(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(|e| io_fault(&path, &e)),
        }
    }

    fn delete_unchanged(&self, key: &str, read: &Version, limits: CallLimits<'_>) -> Result<()> {
        let path = self.path(key)?;
        if !self.exists()? {
            return Err(Fault::Condition);
        }
        let _lock = self.lock(true, limits)?;
        check_version(&path, read)?;
        match fs::remove_file(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(Fault::Condition),
            removed => removed.map_err(|e| io_fault(&path, &e)),
        }
    }
}

/// Fails with [`Fault::Condition`] if a file is missing or its version is not `read`.
fn check_version(path: &Path, read: &Version) -> Result<()> {
    match fs::metadata(path) {
        Ok(meta) if version(&meta) == *read => Ok(()),
        Ok(_) => Err(Fault::Condition),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(Fault::Condition),
        Err(e) => Err(io_fault(path, &e)),
    }
}

/// Returns the version of a file. Each write creates a new file, so the inode, time or size changes.
fn version(meta: &Metadata) -> Version {
    Version(format!("{:x}-{:x}-{:x}-{:x}", meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.len()))
}

/// Minimum number of parent directories to flush: an earlier call may have created them and failed before it
/// flushed them.
const FLUSHED_PARENTS_MIN: usize = 3;

/// Creates a directory and its missing parents, and flushes the parent of each created directory.
fn make_dir(dir: &Path) -> Result<()> {
    let created = dir.ancestors().take_while(|dir| !dir.is_dir()).count();
    if created == 0 {
        return Ok(());
    }
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|e| io_fault(dir, &e))?;
    let parents = dir.ancestors().skip(1).take(created.max(FLUSHED_PARENTS_MIN));
    let parents = parents.filter(|dir| !dir.as_os_str().is_empty());
    parents.into_iter().try_for_each(|dir| sync_dir(dir, open_dir(dir)?))
}

/// Opens a directory to flush it. Returns `None` if this user cannot read the directory: it was then not
/// created here, and needs no flush.
fn open_dir(dir: &Path) -> Result<Option<File>> {
    match File::open(dir) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        opened => opened.map(Some).map_err(|e| io_fault(dir, &e)),
    }
}

fn sync_dir(dir: &Path, opened: Option<File>) -> Result<()> {
    opened.map_or(Ok(()), |file| file.sync_all()).map_err(|e| io_fault(dir, &e))
}

fn io_fault(path: &Path, error: &io::Error) -> Fault {
    let text = format!("{}: {}", path.display(), WriteErrorText(error));
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => {
            Fault::NotFound
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Fault::Denied(text),
        io::ErrorKind::Interrupted | io::ErrorKind::ResourceBusy => Fault::Transient(text),
        _ => Fault::Other(text),
    }
}
