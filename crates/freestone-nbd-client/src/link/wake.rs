//! Wake-ups of connection threads, and the deadline of a handshake.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use freestone_core::sync::Instant;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::error::LinkError;

/// Poll interval for events without a notification, such as room in the queue of a Unix socket.
const PAUSE: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub struct Waker {
    event: OwnedFd,
    stopped: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitResult {
    /// True if the socket is readable or closed.
    pub readable: bool,
}

impl Waker {
    /// Returns a waker without a pending wake-up.
    pub fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event, stopped: AtomicBool::new(false) })
    }

    /// Wakes the thread, or makes its next wait return at once.
    pub fn wake(&self) {
        freestone_core::eventfd::wake(&self.event);
    }

    /// Wakes the thread and makes it end.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.wake();
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Waits for the socket or a wake-up, at most for the time `most`.
    pub fn wait(
        &self,
        socket: Option<(BorrowedFd<'_>, PollFlags)>,
        most: Duration,
    ) -> io::Result<WaitResult> {
        let most = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
        let event = PollFd::new(&self.event, PollFlags::IN);
        // The second entry is used only with a socket.
        let mut fds = [event.clone(), event];
        if let Some((fd, flags)) = socket {
            fds[1] = PollFd::from_borrowed_fd(fd, flags);
        }
        let fds = &mut fds[..=usize::from(socket.is_some())];
        match poll(fds, Some(&most)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if !fds[0].revents().is_empty() {
            let mut count = [0; 8];
            // Resets the eventfd, which only this thread reads.
            let _ = rustix::io::read(&self.event, &mut count);
        }
        let ends = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        Ok(WaitResult { readable: fds.get(1).is_some_and(|fd| fd.revents().intersects(ends)) })
    }
}

/// Deadline of a handshake.
#[derive(Debug, Clone, Copy)]
pub struct Deadline<'a> {
    wake: &'a Waker,
    allowed: Duration,
    end: Instant,
}

impl<'a> Deadline<'a> {
    /// Starts a deadline of `allowed` from now.
    pub fn new(wake: &'a Waker, allowed: Duration) -> Self {
        Self { wake, allowed, end: Instant::now() + allowed }
    }

    /// Waits until the socket has one of the events in `flags`, or a wake-up arrives.
    ///
    /// # Errors
    /// The deadline has passed, or the device is being dropped.
    pub fn wait(&self, socket: BorrowedFd<'_>, flags: PollFlags) -> Result<(), LinkError> {
        self.wake.wait(Some((socket, flags)), self.left()?)?;
        Ok(())
    }

    /// Waits for [`PAUSE`], for events without a notification.
    ///
    /// # Errors
    /// The deadline has passed, or the device is being dropped.
    pub fn pause(&self) -> Result<(), LinkError> {
        self.left()?;
        self.wake.wait(None, PAUSE)?;
        Ok(())
    }

    fn left(&self) -> Result<Duration, LinkError> {
        if self.wake.is_stopped() {
            return Err(LinkError::Stopped);
        }
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(LinkError::Timeout(self.allowed)) } else { Ok(left) }
    }
}
