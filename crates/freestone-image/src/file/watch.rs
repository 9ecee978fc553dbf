//! Detection of changes of read-only files. The devices over them assume that the files are
//! immutable.
//!
//! One thread per process checks size, modification time and path of all watched files. The thread
//! runs every ten seconds and when [`request_check`] or [`check_now`] requests a check. I/O
//! requests never wait for a check. `check_now` waits no longer than its timeout, since a disk may
//! hang.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Weak;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::time::Duration;

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use freestone_core::sync::{Arc, Condvar, Instant, LazyLock, Mutex, thread};

/// Interval between periodic checks of the watched files.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Change of a read-only file since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FileChange {
    /// Size or modification time differ. Reads may return a mixture of old and new data.
    Modified = 1,
    /// The path refers to another file now. Reads still return the old file.
    Replaced = 2,
    /// The path does not exist any more. Reads still return the old file.
    Removed = 3,
}

impl FileChange {
    const fn of(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Modified),
            2 => Some(Self::Replaced),
            3 => Some(Self::Removed),
            _ => None,
        }
    }
}

impl fmt::Display for FileChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Modified => "modified",
            Self::Replaced => "replaced",
            Self::Removed => "removed",
        })
    }
}

/// Properties of a file that are equal as long as the file is unchanged.
#[derive(Debug, PartialEq, Eq)]
enum Identity {
    /// Device number of a block device, whose size and times do not show changes.
    Disk(u64),
    File {
        place: (u64, u64),
        size: i64,
        modified: (i64, i64),
    },
}

impl Identity {
    fn of(stat: &Stat) -> Self {
        if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
            return Self::Disk(stat.st_rdev);
        }
        let modified = (stat.st_mtime, stat.st_mtime_nsec as i64);
        Self::File { place: (stat.st_dev, stat.st_ino), size: stat.st_size, modified }
    }
}

/// A watched file. Checks of the file stop when the last reference is dropped.
#[derive(Debug)]
pub(super) struct FileWatch {
    path: PathBuf,
    opened: Identity,
    /// True on FUSE, where inode numbers may change with the next mount.
    is_fuse: bool,
    /// The [`FileChange`] found by the last check as a number, or 0 for an unchanged file.
    found: AtomicU8,
}

/// File system type of FUSE, as statfs(2) reports it.
const FUSE_SUPER_MAGIC: u64 = 0x6573_5546;

impl FileWatch {
    /// Starts watching the file `fd`, which was opened at `path`.
    pub fn new(path: &Path, fd: BorrowedFd<'_>, stat: &Stat) -> rustix::io::Result<Arc<Self>> {
        let is_fuse = match rustix::fs::fstatfs(fd) {
            Ok(fs) => fs.f_type as u64 == FUSE_SUPER_MAGIC,
            // Only FUSE file systems can lack `fstatfs`.
            Err(Errno::NOSYS) => true,
            Err(errno) => return Err(errno),
        };
        let (path, opened) = (path.to_owned(), Identity::of(stat));
        let watched = Arc::new(Self { path, opened, is_fuse, found: AtomicU8::new(0) });
        let mut state = WATCHER.lock();
        state.files.retain(|file| file.strong_count() > 0);
        state.files.push(Arc::downgrade(&watched));
        if !state.running {
            match thread::Builder::new().name("freestone-files".into()).spawn(run) {
                Ok(_) => state.running = true,
                Err(error) => tracing::warn!(%error, "cannot start the thread that detects changed files"),
            }
        }
        // Wake the watcher thread, which may have had no files to check.
        WATCHER_CHANGED.notify_all();
        Ok(watched)
    }

    /// Returns size in bytes, modification time and inode of the file at opening, as text; `None`
    /// for a block device. The inode is given as 0 on FUSE, which may renumber files with each
    /// mount.
    pub fn identity(&self) -> Option<String> {
        let Identity::File { place: (_, inode), size, modified: (seconds, nanos) } = self.opened else {
            return None;
        };
        let inode = if self.is_fuse { 0 } else { inode };
        Some(format!("{size} {seconds}.{nanos:09} {inode}"))
    }

    /// Returns the change found by the last check; `None` if the file was unchanged.
    pub fn change(&self) -> Option<FileChange> {
        FileChange::of(self.found.load(SeqCst))
    }

    fn check(&self) {
        let found = match rustix::fs::stat(&self.path) {
            Ok(stat) => match (&self.opened, Identity::of(&stat)) {
                (opened, now) if *opened == now => None,
                (Identity::File { place: old, .. }, Identity::File { place: new, .. }) if *old == new => {
                    Some(FileChange::Modified)
                }
                _ => Some(FileChange::Replaced),
            },
            Err(Errno::NOENT | Errno::NOTDIR) => Some(FileChange::Removed),
            // Keep the last result: the path could not be examined, but the next check may succeed.
            Err(_) => return,
        };
        let before = self.found.swap(found.map_or(0, |found| found as u8), SeqCst);
        if let Some(found) = found
            && before != found as u8
        {
            let path = self.path.display();
            match found {
                FileChange::Modified => tracing::warn!(
                    "{path}: was modified while it is served read-only; reads may return a mixture of old and new data"
                ),
                FileChange::Replaced | FileChange::Removed => {
                    tracing::warn!(
                        "{path}: was {found} while it is served read-only; the old file is still served"
                    );
                }
            }
        }
    }
}

#[derive(Default)]
struct Watcher {
    files: Vec<Weak<FileWatch>>,
    running: bool,
    /// Number of checks requested, and the number of the last requested check that finished.
    requested: u64,
    finished: u64,
}

/// Leaf lock: no other lock is taken under it. The lock is not held while files are checked.
static WATCHER: LazyLock<Mutex<Watcher>> = LazyLock::new(Mutex::default);
static WATCHER_CHANGED: Condvar = Condvar::new();

/// Requests a check of all watched files without waiting.
pub fn request_check() {
    WATCHER.lock().requested += 1;
    WATCHER_CHANGED.notify_all();
}

/// Requests a check of all watched files, and waits until it has finished, for `most` at most.
pub fn check_now(most: Duration) {
    let mut state = WATCHER.lock();
    if !state.running {
        return;
    }
    state.requested += 1;
    let requested = state.requested;
    WATCHER_CHANGED.notify_all();
    drop(WATCHER_CHANGED.wait_timeout_while(state, most, |state| state.finished < requested));
}

/// Main function of the watcher thread.
fn run() {
    let mut last = Instant::now();
    loop {
        let (files, requested) = {
            let mut state = WATCHER.lock();
            loop {
                state.files.retain(|file| file.strong_count() > 0);
                let left = CHECK_INTERVAL.saturating_sub(last.elapsed());
                if state.requested > state.finished || (left.is_zero() && !state.files.is_empty()) {
                    break;
                }
                state = if state.files.is_empty() {
                    freestone_core::pin::wait(&WATCHER_CHANGED, state)
                } else {
                    WATCHER_CHANGED.wait_timeout(state, left).0
                };
            }
            (state.files.clone(), state.requested)
        };
        for file in files.iter().filter_map(Weak::upgrade) {
            file.check();
        }
        last = Instant::now();
        WATCHER.lock().finished = requested;
        WATCHER_CHANGED.notify_all();
    }
}
