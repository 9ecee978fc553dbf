//! Format of the cache file of a chunk: the pages, then a trailer with their checksums. The pages come first,
//! which aligns them in the file, so the kernel can cache them in large folios.
//!
//! ```text
//!    0       pages
//! then a page of
//!    0    8  "FSTCACHE"
//!    8   32  name of the chunk
//!   40    4  number of pages; all numbers are little endian
//!   44    4  zeroes
//!   48 1024  XXH3 of each page
//! 1072    8  XXH3 of the first 1072 bytes of this page
//! ```

use crate::rt::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::rt::time::{Duration, SystemTime};
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::{Errno, ReadWriteFlags, pread, preadv2};
use xxhash_rust::xxh3::xxh3_64;

use crate::format::name::Name;
use crate::format::{CHUNK_PAGES, PAGE};

const MAGIC: [u8; 8] = *b"FSTCACHE";
const SUMS_AT: usize = 48;
const SUM_AT: usize = SUMS_AT + CHUNK_PAGES * 8;
const _: () = assert!(SUM_AT + 8 <= PAGE);
/// Granularity of the time of last use of a cache file. A younger time is not updated, which saves metadata
/// writes.
const USED_EVERY: Duration = Duration::from_secs(600);

/// Returns the trailer that follows the pages in the cache file of a chunk.
pub(super) fn trailer(name: &Name, pages: &[u8]) -> Vec<u8> {
    let mut trailer = vec![0; PAGE];
    trailer[..8].copy_from_slice(&MAGIC);
    trailer[8..40].copy_from_slice(&name.0);
    trailer[40..44].copy_from_slice(&((pages.len() / PAGE) as u32).to_le_bytes());
    for (sum, page) in trailer[SUMS_AT..SUM_AT].chunks_mut(8).zip(pages.chunks(PAGE)) {
        sum.copy_from_slice(&xxh3_64(page).to_le_bytes());
    }
    let sum = xxh3_64(&trailer[..SUM_AT]).to_le_bytes();
    trailer[SUM_AT..SUM_AT + 8].copy_from_slice(&sum);
    trailer
}

/// Sets the time of last use (the modification time) of a cache file to now, if the recorded time is older
/// than [`USED_EVERY`].
pub(super) fn touch(file: &File) {
    let now = SystemTime::now();
    let is_old = |at: SystemTime| now.duration_since(at).is_ok_and(|age| age > USED_EVERY);
    if file.metadata().and_then(|meta| meta.modified()).is_ok_and(is_old) {
        let _ = file.set_modified(now);
    }
}

/// Open cache file of a chunk, with the checksums of its pages.
#[derive(Debug)]
pub struct Entry {
    file: File,
    sums: Box<[u64]>,
    /// True if the chunk was read since the last call of [`was_used`](Self::was_used), which clears the flag.
    is_used: AtomicBool,
    /// Bitmap of the pages whose copy in the kernel's page cache was verified. A read that may have reached
    /// the disk clears all bits.
    verified: [AtomicU64; WORDS],
}

/// Number of 64-bit words in a bitmap with a bit for each page of a chunk.
const WORDS: usize = CHUNK_PAGES / 64;

/// Result of a read of pages from a cache file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The pages were read, and match their checksums.
    Done,
    /// A read without waiting failed because the pages are not in the kernel's page cache.
    WouldBlock,
    /// The cache file is damaged, truncated or unreadable.
    Damaged,
}

impl Entry {
    /// Opens the cache file of the chunk `name`. Returns `None` if the file does not exist, and an
    /// `InvalidData` error if it is damaged.
    pub(super) fn open(path: &Path, name: &Name) -> io::Result<Option<Self>> {
        let untimed =
            File::options().read(true).custom_flags(OFlags::NOATIME.bits().cast_signed()).open(path);
        // Only the owner of a file may use O_NOATIME, so a failed open is repeated without this flag.
        let file = match untimed.or_else(|_| File::open(path)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let damaged = || io::Error::new(io::ErrorKind::InvalidData, "is damaged");
        let mut trailer = [0; SUM_AT + 8];
        let at = file.metadata()?.len().checked_sub(PAGE as u64).ok_or_else(damaged)?;
        file.read_exact_at(&mut trailer, at).map_err(|_| damaged())?;
        let number = |at: usize| trailer[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
        let pages = (number(40) & u64::from(u32::MAX)) as usize;
        let is_sound = trailer[..8] == MAGIC
            && trailer[8..40] == name.0
            && pages <= CHUNK_PAGES
            && at == (pages * PAGE) as u64
            && number(SUM_AT) == xxh3_64(&trailer[..SUM_AT]);
        if !is_sound {
            return Err(damaged());
        }
        let sums = (0..pages).map(|page| number(SUMS_AT + page * 8)).collect();
        Ok(Some(Self { file, sums, is_used: AtomicBool::new(true), verified: Default::default() }))
    }

    /// Updates the time of last use of the file. All processes that share the cache choose files to evict by
    /// this time.
    pub(super) fn mark_used(&self) {
        touch(&self.file);
    }

    /// Returns true if the chunk was read since the previous call.
    pub fn was_used(&self) -> bool {
        // Relaxed: the flag is only a hint which open file to close.
        self.is_used.swap(false, Ordering::Relaxed)
    }

    /// Returns the number of pages in the cache file. Later pages of the chunk are zeroes.
    pub fn pages(&self) -> usize {
        self.sums.len()
    }

    /// Reads whole pages of the chunk, starting at page `first`, and verifies their checksums. If `wait` is
    /// false, reads only from the kernel's page cache.
    pub fn read(&self, first: usize, out: &mut [u8], wait: bool) -> ReadOutcome {
        // Relaxed: the flag is only a hint which open file to close. The load avoids writes to a cache line
        // that all readers share.
        if !self.is_used.load(Ordering::Relaxed) {
            self.is_used.store(true, Ordering::Relaxed);
        }
        let there = self.pages().saturating_sub(first) * PAGE;
        let (there, behind) = out.split_at_mut(there.min(out.len()));
        behind.fill(0);
        let mut done = 0;
        while done < there.len() {
            let offset = (first * PAGE + done) as u64;
            let rest = &mut there[done..];
            let result = if wait {
                pread(&self.file, rest, offset)
            } else {
                preadv2(&self.file, &mut [IoSliceMut::new(rest)], offset, ReadWriteFlags::NOWAIT)
            };
            match result {
                Ok(0) => return ReadOutcome::Damaged,
                Ok(more) => done += more,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::NOSYS) if !wait => {
                    return ReadOutcome::WouldBlock;
                }
                Err(_) => return ReadOutcome::Damaged,
            }
        }
        if wait {
            // The read may have replaced pages in the kernel's page cache with unverified data from the disk.
            for word in &self.verified {
                // Relaxed: the bits are independent of other memory accesses.
                word.store(0, Ordering::Relaxed);
            }
        }
        let mut number = first;
        let end = first + there.len() / PAGE;
        while number < end {
            let word = &self.verified[number / 64];
            // Relaxed: the bits are independent of other memory accesses.
            let known = (word.load(Ordering::Relaxed) >> (number % 64)).trailing_ones() as usize;
            if known > 0 {
                number += known;
                continue;
            }
            let at = (number - first) * PAGE;
            if xxh3_64(&there[at..at + PAGE]) != self.sums[number] {
                return ReadOutcome::Damaged;
            }
            // Relaxed: the bits are independent of other memory accesses.
            word.fetch_or(1 << (number % 64), Ordering::Relaxed);
            number += 1;
        }
        ReadOutcome::Done
    }
}
