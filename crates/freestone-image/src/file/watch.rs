//! Whether files that are only read stay as they were: their devices take them for unchanging.
//!
//! A thread of the process asks for the size and the time of modification of what lies at their
//! paths: every ten seconds, and where somebody wants to know. No request waits for it; who wants
//! to know waits no longer than he says, as a disk may hang.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::sync::{PoisonError, Weak};
use std::time::Duration;

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use freestone_core::sync::{Arc, Condvar, Instant, LazyLock, Mutex, MutexGuard, thread};

/// Time between two looks that nobody asked for.
const EVERY: Duration = Duration::from_secs(10);

/// What became of a file that was opened to be read only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Changed {
    /// It has another size or another time of modification: what is read may be a mixture of old
    /// and new.
    Modified = 1,
    /// Another file lies at its path. What is read is still the old one.
    Replaced = 2,
    /// Nothing lies at its path. What is read is still the old file.
    Removed = 3,
}

impl Changed {
    const fn of(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Modified),
            2 => Some(Self::Replaced),
            3 => Some(Self::Removed),
            _ => None,
        }
    }
}

impl fmt::Display for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Modified => "modified",
            Self::Replaced => "replaced",
            Self::Removed => "removed",
        })
    }
}

/// What a file is known by.
#[derive(Debug, PartialEq, Eq)]
enum Identity {
    /// A disk has no other size or time than that of its node.
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

/// A file that is looked at as long as this is there.
#[derive(Debug)]
pub(super) struct Watched {
    path: PathBuf,
    opened: Identity,
    /// The inode number means nothing after the next mount.
    is_fuse: bool,
    /// A [`Changed`], or 0.
    found: AtomicU8,
}

/// Of statfs(2), for file systems in user space.
const FUSE_SUPER_MAGIC: u64 = 0x6573_5546;

impl Watched {
    /// Watches a file that was opened at `path`.
    ///
    /// # Errors
    /// The file system cannot be examined.
    pub fn new(path: &Path, fd: BorrowedFd<'_>, stat: &Stat) -> rustix::io::Result<Arc<Self>> {
        let is_fuse = match rustix::fs::fstatfs(fd) {
            Ok(fs) => fs.f_type as u64 == FUSE_SUPER_MAGIC,
            // Only file systems in user space may lack the call.
            Err(Errno::NOSYS) => true,
            Err(errno) => return Err(errno),
        };
        let (path, opened) = (path.to_owned(), Identity::of(stat));
        let watched = Arc::new(Self { path, opened, is_fuse, found: AtomicU8::new(0) });
        let mut rounds = ROUNDS.lock();
        rounds.files.retain(|file| file.strong_count() > 0);
        rounds.files.push(Arc::downgrade(&watched));
        if !rounds.running {
            match thread::Builder::new().name("freestone-files".into()).spawn(run) {
                Ok(_) => rounds.running = true,
                Err(error) => tracing::warn!(%error, "files that change are not noticed"),
            }
        }
        // Wakes a thread that had nothing to look at.
        CHANGE.notify_all();
        Ok(watched)
    }

    /// Returns size in bytes, time of modification and inode of the file as it was opened, as text;
    /// `None` of a disk. The inode is 0 on FUSE, which may number files anew with each mount.
    pub fn identity(&self) -> Option<String> {
        let Identity::File { place: (_, inode), size, modified: (seconds, nanos) } = self.opened else {
            return None;
        };
        let inode = if self.is_fuse { 0 } else { inode };
        Some(format!("{size} {seconds}.{nanos:09} {inode}"))
    }

    /// As of the last look.
    pub fn changed(&self) -> Option<Changed> {
        Changed::of(self.found.load(SeqCst))
    }

    fn look(&self) {
        let found = match rustix::fs::stat(&self.path) {
            Ok(stat) => match (&self.opened, Identity::of(&stat)) {
                (opened, now) if *opened == now => None,
                (Identity::File { place: old, .. }, Identity::File { place: new, .. }) if *old == new => {
                    Some(Changed::Modified)
                }
                _ => Some(Changed::Replaced),
            },
            Err(Errno::NOENT | Errno::NOTDIR) => Some(Changed::Removed),
            // The next look may succeed.
            Err(_) => return,
        };
        let before = self.found.swap(found.map_or(0, |found| found as u8), SeqCst);
        if let Some(found) = found
            && before != found as u8
        {
            let path = self.path.display();
            match found {
                Changed::Modified => tracing::warn!(
                    "{path}: was modified by others while it is served read-only; what is read of it may be a mixture"
                ),
                Changed::Replaced | Changed::Removed => {
                    tracing::warn!("{path}: was {found} by others; the file that was there is still served");
                }
            }
        }
    }
}

#[derive(Default)]
struct Rounds {
    files: Vec<Weak<Watched>>,
    running: bool,
    /// Rounds that were asked for, and the last of them that is done.
    asked: u64,
    done: u64,
}

/// Lock order: nothing is taken under it. Held for a look.
static ROUNDS: LazyLock<Mutex<Rounds>> = LazyLock::new(Mutex::default);
static CHANGE: Condvar = Condvar::new();

/// Has files looked at soon.
pub fn look_soon() {
    ROUNDS.lock().asked += 1;
    CHANGE.notify_all();
}

/// Has files looked at, and waits for that, but no longer than `most`.
pub fn look_now(most: Duration) {
    let until = Instant::now() + most;
    let mut rounds = ROUNDS.lock();
    if !rounds.running {
        return;
    }
    rounds.asked += 1;
    let asked = rounds.asked;
    CHANGE.notify_all();
    while rounds.done < asked {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        rounds = wait(rounds, left);
    }
}

fn wait(rounds: MutexGuard<'_, Rounds>, most: Duration) -> MutexGuard<'_, Rounds> {
    CHANGE.wait_timeout(rounds, most).unwrap_or_else(PoisonError::into_inner).0
}

/// The thread.
fn run() {
    let mut last = Instant::now();
    loop {
        let (files, asked) = {
            let mut rounds = ROUNDS.lock();
            loop {
                rounds.files.retain(|file| file.strong_count() > 0);
                let left = EVERY.saturating_sub(last.elapsed());
                if rounds.asked > rounds.done || (left.is_zero() && !rounds.files.is_empty()) {
                    break;
                }
                rounds = if rounds.files.is_empty() {
                    freestone_core::pin::wait(&CHANGE, rounds)
                } else {
                    wait(rounds, left)
                };
            }
            (rounds.files.clone(), rounds.asked)
        };
        for file in files.iter().filter_map(Weak::upgrade) {
            file.look();
        }
        last = Instant::now();
        ROUNDS.lock().done = asked;
        CHANGE.notify_all();
    }
}
