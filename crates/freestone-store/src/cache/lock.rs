//! Fetch locks: on one host, one process at a time fetches an object from the object store. The lock is a
//! byte range lock on a file, at an offset derived from the name of the object. The kernel releases the lock
//! when the process exits.

use crate::rt::thread;
use crate::rt::time::Duration;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;

use freestone_core::file_locks::lock_byte;
use rustix::io::Errno;

use super::Cache;
use crate::format::name::Name;
use crate::objects::CallLimits;

/// Pause after the first attempt to get a fetch lock. Each later pause is twice as long, up to `PAUSE_MAX`.
const PAUSE_FIRST: Duration = Duration::from_millis(1);
/// Longest pause between attempts to get a fetch lock.
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// Lock on the fetch of one object, released on drop.
#[derive(Debug)]
pub struct FetchLock(#[expect(dead_code, reason = "closing it unlocks")] File);

impl Cache {
    pub(super) fn open_fetching(&self) -> io::Result<File> {
        File::options().create(true).truncate(false).read(true).write(true).open(self.dir.join("fetching"))
    }

    /// Locks the fetch of an object. Waits until no other process on this host fetches the object, which may
    /// then be in the cache. Returns `None` on timeout or if locks are unavailable; the caller then fetches
    /// the object anyway.
    pub fn lock_fetch(&self, name: &Name, limits: CallLimits<'_>) -> Option<FetchLock> {
        let file = self.open_fetching().ok()?;
        let start = name.0.first_chunk::<8>()?;
        // The offset of a byte range lock is a signed 64-bit number. With 62 bits of the name the offset and
        // the end of the range are valid.
        let byte = (u64::from_le_bytes(*start) & (u64::MAX >> 2)) as i64;
        let mut pause = PAUSE_FIRST;
        loop {
            match lock_byte(file.as_fd(), byte) {
                Ok(()) => return Some(FetchLock(file)),
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(_) => return None,
            }
            if limits.check().is_err() {
                return None;
            }
            thread::sleep(pause);
            pause = PAUSE_MAX.min(pause * 2);
        }
    }
}
