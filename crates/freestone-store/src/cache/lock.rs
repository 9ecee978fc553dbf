//! One fetch of a chunk on a host: who fetches it has a byte of a file locked, which the name of the
//! chunk chooses. The lock goes with the process.

use crate::rt::thread;
use crate::rt::time::Duration;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;

use freestone_core::file_locks::lock_byte;
use rustix::io::Errno;

use super::Cache;
use crate::format::name::Name;
use crate::objects::Until;

/// How often it is tried, at first and later.
const PAUSE_FIRST: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// Held until it goes.
#[derive(Debug)]
pub struct FetchLock(#[expect(dead_code, reason = "closing it unlocks")] File);

impl Cache {
    pub(super) fn fetching(&self) -> io::Result<File> {
        File::options().create(true).truncate(false).read(true).write(true).open(self.dir.join("fetching"))
    }

    /// Waits until nobody else on this host fetches the chunk; `None` where that did not come in time, or
    /// there are no such locks: then it is fetched anyway. True: somebody did meanwhile, so it may be there
    /// now.
    pub fn lock_fetch(&self, name: &Name, until: Until<'_>) -> (Option<FetchLock>, bool) {
        let Ok(file) = self.fetching() else { return (None, false) };
        let Some(start) = name.0.first_chunk::<8>() else { return (None, false) };
        // An offset of a file has 63 bits.
        let byte = (u64::from_le_bytes(*start) & (u64::MAX >> 2)) as i64;
        let (mut pause, mut waited) = (PAUSE_FIRST, false);
        loop {
            match lock_byte(file.as_fd(), byte) {
                Ok(()) => return (Some(FetchLock(file)), waited),
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(_) => return (None, waited),
            }
            waited = true;
            if until.check().is_err() {
                return (None, waited);
            }
            thread::sleep(pause);
            pause = PAUSE_MAX.min(pause * 2);
        }
    }
}
