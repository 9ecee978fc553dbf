//! Waits for the end of a process by its descriptor (pidfd), which cannot refer to a later process with the same ID.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Waits until the process has ended, for at most `max`; `None` means no limit. Returns true if the process has ended, even
/// if its parent has not collected its status yet.
///
/// # Errors
/// The kernel cannot wait, because it lacks memory.
pub fn wait(process: impl AsFd, max: Option<Duration>) -> io::Result<bool> {
    let begun = Instant::now();
    loop {
        let left = max.map(|max| max.saturating_sub(begun.elapsed()));
        let left =
            left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
        match poll(&mut [PollFd::new(&process, PollFlags::IN)], left.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
