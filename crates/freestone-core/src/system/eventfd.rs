//! Wake-ups through an eventfd. A thread that polls the descriptor must not miss a wake-up.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::io::Errno;

use crate::sync::thread;

/// Pause after a write to the eventfd that failed for another reason than a signal.
const RETRY_PAUSE: Duration = if cfg!(test) { Duration::ZERO } else { Duration::from_millis(1) };
/// Number of failed writes, over about a second, after which the wake-up is abandoned.
const FAILURES_MAX: u32 = if cfg!(test) { 20 } else { 1000 };

/// Makes a non-blocking eventfd readable, which wakes the thread that polls it.
pub fn wake(eventfd: impl AsFd) {
    let eventfd = eventfd.as_fd();
    add_one(|| rustix::io::write(eventfd, &1_u64.to_ne_bytes()));
}

fn add_one(mut write: impl FnMut() -> rustix::io::Result<usize>) {
    let mut failures = 0;
    loop {
        match write() {
            // EAGAIN: the counter is full, so the eventfd is readable already.
            Ok(_) | Err(Errno::AGAIN) => return,
            Err(Errno::INTR) => {}
            Err(errno) => {
                failures += 1;
                if failures == FAILURES_MAX {
                    crate::client_log!(error, "cannot wake a thread: {errno}");
                    return;
                }
                thread::sleep(RETRY_PAUSE);
            }
        }
    }
}

#[cfg(all(test, not(freestone_sim)))]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// Returns the number of calls made if the first calls fail with `failures`.
    fn calls(failures: &[Errno]) -> usize {
        let mut calls = 0;
        add_one(|| {
            calls += 1;
            failures.get(calls - 1).map_or(Ok(8), |errno| Err(*errno))
        });
        calls
    }

    #[test]
    fn failed_write_is_repeated() {
        assert_eq!(calls(&[]), 1);
        assert_eq!(calls(&[Errno::INTR, Errno::INTR, Errno::NOMEM]), 4);
        assert_eq!(calls(&[Errno::INTR, Errno::AGAIN, Errno::INTR]), 2);
        assert_eq!(calls(&[Errno::BADF; 100]), FAILURES_MAX as usize);
    }

    #[test]
    fn full_counter_stays_readable() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        wake(&fd);
        assert_eq!(rustix::io::read(&fd, &mut [0_u8; 8]), Ok(8));
        wake(&fd);
        let mut count = [0; 8];
        assert_eq!(rustix::io::read(&fd, &mut count), Ok(8));
        assert_eq!(u64::from_ne_bytes(count), 1);
    }
}
