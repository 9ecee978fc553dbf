//! How a queue's thread sleeps.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

const KICK: u64 = 0;
const WAKE: u64 = 1;

/// Waits for the driver and for what else wakes the thread.
///
/// Of the driver's eventfd each write is one event, seen once, so that its counter is never read:
/// a system call less a sleep.
#[derive(Debug)]
pub struct Sleep(OwnedFd);

impl Sleep {
    /// Until `kick` is written to, or `wake` is readable.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn new(kick: impl AsFd, wake: impl AsFd) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, kick, EventData::new_u64(KICK), EventFlags::IN | EventFlags::ET)?;
        epoll::add(&epoll, wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        Ok(Self(epoll))
    }

    /// Sleeps; whether `wake` was readable. A signal may end it early.
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
    fn each_write_is_seen_once_and_none_is_lost() {
        let [kick, wake] = [(); 2].map(|()| eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let add = |fd: &OwnedFd| write(fd, &1_u64.to_ne_bytes()).unwrap();
        add(&kick);
        let sleep = Sleep::new(&kick, &wake).unwrap();
        assert!(!sleep.wait(), "what was written before");
        add(&kick);
        add(&kick);
        assert!(!sleep.wait());
        // It would sleep for ever now, if the first were seen again or the next one were not.
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
