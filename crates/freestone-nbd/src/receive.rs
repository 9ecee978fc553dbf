//! Receive system calls, and how long they are waited for outside of the transmission phase.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// What a receive brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// At least one byte.
    Data,
    /// Nothing yet.
    WouldBlock,
    /// The peer sends no more, or the connection broke.
    End,
}

/// What a receive system call brought, and how many bytes.
#[inline]
pub fn outcome(bytes: Result<usize, Errno>) -> (Received, usize) {
    match bytes {
        Ok(0) => (Received::End, 0),
        Ok(n) => (Received::Data, n),
        Err(Errno::WOULDBLOCK) => (Received::WouldBlock, 0),
        Err(_) => (Received::End, 0),
    }
}

/// One receive system call; 0 is the end of the stream.
#[inline]
pub fn receive_into(socket: BorrowedFd<'_>, flags: RecvFlags, buf: &mut [u8]) -> Result<usize, Errno> {
    rustix::io::retry_on_intr(|| recv(socket, &mut *buf, flags).map(|(n, _)| n))
}

/// How long a client is waited for: in its handshake, and once more at its end.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// Without a byte.
    pub silence: Duration,
    /// For all of it.
    pub deadline: Instant,
}

/// Why nothing is waited for any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Impatient {
    /// The client took too long.
    TimedOut,
    /// There is nothing to wait with.
    Left,
}

impl Patience {
    /// Waits until the socket has something.
    pub fn wait(&self, socket: BorrowedFd<'_>) -> Result<(), Impatient> {
        let left = self.deadline.saturating_duration_since(Instant::now()).min(self.silence);
        if left.is_zero() {
            return Err(Impatient::TimedOut);
        }
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
        match rustix::io::retry_on_intr(|| poll(&mut fds, Some(&left))) {
            Ok(0) => Err(Impatient::TimedOut),
            Ok(_) => Ok(()),
            Err(_) => Err(Impatient::Left),
        }
    }
}
