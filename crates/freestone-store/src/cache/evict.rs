//! Size limit of a cache: reservation of space, and eviction of the least recently used files.

use crate::rt::thread;
use crate::rt::time::{Duration, SystemTime};
use std::fs::{self, File, Metadata};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::{CHUNKS, Cache, META, NEW};
use crate::objects::{CallLimits, Fault};

/// Age after which an incomplete cache file is treated as abandoned by its writer, and deleted.
const LEFT_AFTER: Duration = Duration::from_secs(3600);
/// Pause between attempts to lock the `usage` file of the cache.
const PAUSE: Duration = Duration::from_millis(2);
/// An eviction continues until `1/FREED_PART` of the size limit is free, so evictions are rare.
const FREED_PART: u64 = 8;

impl Cache {
    pub(super) fn open_usage(&self) -> io::Result<File> {
        File::options().create(true).truncate(false).read(true).write(true).open(self.dir.join("usage"))
    }

    /// Creates the file `new` with a size of `bytes`, and adds this size to the usage of the cache. Evicts
    /// other files if the size limit would be exceeded.
    pub(super) fn reserve(&self, new: &Path, bytes: u64, limits: CallLimits<'_>) -> io::Result<File> {
        let mut usage = self.open_usage()?;
        loop {
            match flock(&usage, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            if let Err(fault) = limits.check() {
                let kind = if fault == Fault::TimedOut {
                    io::ErrorKind::TimedOut
                } else {
                    io::ErrorKind::Interrupted
                };
                return Err(kind.into());
            }
            thread::sleep(PAUSE);
        }
        let mut text = String::new();
        let read = (&usage).take(32).read_to_string(&mut text);
        let used = read.ok().and_then(|_| text.trim().parse::<u64>().ok());
        let used = match used.and_then(|used| used.checked_add(bytes)) {
            Some(used) if used <= self.limit => used,
            // The recorded usage is unreadable, or the new file would exceed the size limit.
            _ => self.evict_for(bytes)? + bytes,
        };
        let file = File::options().create_new(true).read(true).write(true).open(new)?;
        let counted = (|| {
            file.set_len(bytes)?;
            usage.seek(SeekFrom::Start(0))?;
            let text = format!("{used:<20}\n");
            usage.write_all(text.as_bytes())
        })();
        if let Err(error) = counted {
            let _ = fs::remove_file(new);
            return Err(error);
        }
        Ok(file)
    }

    /// Makes room for `bytes` more: evicts least recently used files if the size limit would be exceeded.
    /// Returns the counted usage of the remaining files in bytes.
    fn evict_for(&self, bytes: u64) -> io::Result<u64> {
        let mut files = Vec::new();
        let mut used = 0;
        let mut visit = |path: PathBuf, meta: &Metadata, is_new: bool| {
            let at = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let age = SystemTime::now().duration_since(at).unwrap_or_default();
            if is_new && age > LEFT_AFTER {
                let _ = fs::remove_file(path);
                return;
            }
            used += meta.len();
            if !is_new {
                files.push((at, meta.len(), path));
            }
        };
        for_each_file(&self.dir.join(NEW), &mut |path, meta| visit(path, meta, true))?;
        for part in [CHUNKS, META] {
            for dir in fs::read_dir(self.dir.join(part))? {
                for_each_file(&dir?.path(), &mut |path, meta| visit(path, meta, false))?;
            }
        }
        if used + bytes > self.limit {
            files.sort_unstable();
            let most = self.limit - self.limit / FREED_PART;
            for (_, len, path) in files {
                if used + bytes <= most {
                    break;
                }
                if fs::remove_file(path).is_ok() {
                    used -= len;
                }
            }
        }
        if used + bytes > self.limit { Err(io::ErrorKind::StorageFull.into()) } else { Ok(used) }
    }
}

fn for_each_file(dir: &Path, visit: &mut dyn FnMut(PathBuf, &Metadata)) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        // Another process deleted the file after it was listed.
        let Ok(meta) = entry.metadata() else { continue };
        if meta.is_file() {
            visit(entry.path(), &meta);
        }
    }
    Ok(())
}
