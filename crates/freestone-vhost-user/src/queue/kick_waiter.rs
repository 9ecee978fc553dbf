//! The wait of a queue's thread for requests and completions.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

const KICK: u64 = 0;
const WAKE: u64 = 1;

/// Sleeps until the driver's kick or an internal wakeup.
///
/// The kick eventfd is registered edge-triggered: each write is one event, and the counter of the
/// eventfd is never read. This saves a system call per sleep.
#[derive(Debug)]
pub struct KickWaiter(OwnedFd);

impl KickWaiter {
    /// Creates a waiter for writes to `kick` and for `wake` to be readable.
    ///
    /// # Errors
    /// Fails if no file descriptor is left.
    pub fn new(kick: impl AsFd, wake: impl AsFd) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, kick, EventData::new_u64(KICK), EventFlags::IN | EventFlags::ET)?;
        epoll::add(&epoll, wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        Ok(Self(epoll))
    }

    /// Sleeps until an event. Returns true if `wake` was readable. A signal may end the sleep
    /// early.
    pub fn wait(&self) -> bool {
        let nothing = Event { flags: EventFlags::empty(), data: EventData::new_u64(KICK) };
        let mut events = [nothing; 2];
        let seen = epoll::wait(&self.0, &mut events[..], None).unwrap_or(0);
        events[..seen].iter().any(|event| event.data.u64() == WAKE)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{read, write};

    use super::*;

    #[test]
    fn kick_ends_one_sleep() {
        let [kick, wake] = [(); 2].map(|()| eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let add = |fd: &OwnedFd| write(fd, &1_u64.to_ne_bytes()).unwrap();
        add(&kick);
        let sleep = KickWaiter::new(&kick, &wake).unwrap();
        assert!(!sleep.wait(), "what was written before");
        add(&kick);
        add(&kick);
        assert!(!sleep.wait());
        // The thread would sleep forever if the next write were lost, and wake early if the first
        // were repeated.
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| sleep.wait());
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert!(!sleeper.is_finished());
            add(&kick);
            assert!(!sleeper.join().unwrap());
        });
        add(&wake);
        assert!(sleep.wait() && sleep.wait(), "as long as it is readable");
        read(&wake, &mut [0_u8; 8]).unwrap();
        add(&kick);
        assert!(!sleep.wait());
    }
}
