//! One fetch of an object on a host: who fetches it has a byte of a file locked, which the name of the
//! object chooses. The lock goes with the process.

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

    /// Waits until nobody else on this host fetches the object: it may be there then. `None` where that did not
    /// come in time, or there are no such locks: then it is fetched anyway.
    pub fn lock_fetch(&self, name: &Name, until: Until<'_>) -> Option<FetchLock> {
        let file = self.fetching().ok()?;
        let start = name.0.first_chunk::<8>()?;
        // An offset of a file has 63 bits.
        let byte = (u64::from_le_bytes(*start) & (u64::MAX >> 2)) as i64;
        let mut pause = PAUSE_FIRST;
        loop {
            match lock_byte(file.as_fd(), byte) {
                Ok(()) => return Some(FetchLock(file)),
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(_) => return None,
            }
            if until.check().is_err() {
                return None;
            }
            thread::sleep(pause);
            pause = PAUSE_MAX.min(pause * 2);
        }
    }
}
