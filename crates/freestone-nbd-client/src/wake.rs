//! How a connection's thread is woken, and how long it waits for a socket.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use freestone_core::sync::Instant;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::error::LinkError;

/// How often it is looked for what nothing tells of.
const PAUSE: Duration = Duration::from_millis(20);

/// Wakes one thread.
#[derive(Debug)]
pub struct Wake {
    event: OwnedFd,
    stopped: AtomicBool,
}

/// What a thread was woken by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    /// The socket has something, or has ended.
    pub readable: bool,
}

impl Wake {
    /// Nobody is woken yet.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event, stopped: AtomicBool::new(false) })
    }

    /// Wakes it, now or when it next waits.
    pub fn wake(&self) {
        freestone_core::eventfd::wake(&self.event);
    }

    /// Wakes it to end, whatever it waits for.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Whether it is to end.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Waits for the socket, to be woken, or for the end of `most`.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn wait(&self, socket: Option<(BorrowedFd<'_>, PollFlags)>, most: Duration) -> io::Result<Ready> {
        let most = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
        let event = PollFd::new(&self.event, PollFlags::IN);
        // The second place is only used where there is a socket.
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
            // Somebody else cannot have taken it, and it need not be there.
            let _ = rustix::io::read(&self.event, &mut count);
        }
        let ends = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        Ok(Ready { readable: fds.get(1).is_some_and(|fd| fd.revents().intersects(ends)) })
    }
}

/// How long a handshake may take.
#[derive(Debug, Clone, Copy)]
pub struct Patience<'a> {
    wake: &'a Wake,
    allowed: Duration,
    end: Instant,
}

impl<'a> Patience<'a> {
    /// From now on.
    pub fn new(wake: &'a Wake, allowed: Duration) -> Self {
        Self { wake, allowed, end: Instant::now() + allowed }
    }

    /// Waits for the socket.
    ///
    /// # Errors
    /// It is over, or the device ends.
    pub fn wait(&self, socket: BorrowedFd<'_>, flags: PollFlags) -> Result<(), LinkError> {
        self.wake.wait(Some((socket, flags)), self.left()?)?;
        Ok(())
    }

    /// Waits a moment for what nothing tells of.
    ///
    /// # Errors
    /// It is over, or the device ends.
    pub fn pause(&self) -> Result<(), LinkError> {
        self.left()?;
        self.wake.wait(None, PAUSE)?;
        Ok(())
    }

    /// How long there is still.
    fn left(&self) -> Result<Duration, LinkError> {
        if self.wake.is_stopped() {
            return Err(LinkError::Ending);
        }
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(LinkError::Silent(self.allowed)) } else { Ok(left) }
    }
}
