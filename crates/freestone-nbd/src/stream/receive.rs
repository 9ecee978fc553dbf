//! Receive system calls, and timeouts for receives outside the transmission phase.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// The result of a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiveResult {
    /// At least one byte was received.
    Data,
    /// No data has arrived yet.
    WouldBlock,
    /// The peer sends no more, or the connection broke.
    Ended,
}

/// Converts the result of a receive system call to a [`ReceiveResult`] and the number of bytes.
#[inline]
pub fn receive_result(bytes: Result<usize, Errno>) -> (ReceiveResult, usize) {
    match bytes {
        Ok(0) => (ReceiveResult::Ended, 0),
        Ok(n) => (ReceiveResult::Data, n),
        Err(Errno::WOULDBLOCK) => (ReceiveResult::WouldBlock, 0),
        Err(_) => (ReceiveResult::Ended, 0),
    }
}

/// Receives once into `buf`. Returns the number of bytes, or 0 at the end of the stream.
#[inline]
pub fn receive_into(socket: BorrowedFd<'_>, flags: RecvFlags, buf: &mut [u8]) -> Result<usize, Errno> {
    rustix::io::retry_on_intr(|| recv(socket, &mut *buf, flags).map(|(n, _)| n))
}

/// The timeouts of a handshake, or of the linger at the end of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// Longest time without a byte from the client.
    pub idle: Duration,
    /// Deadline for the whole phase.
    pub deadline: Instant,
}

/// Why a wait for the client ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitError {
    /// A timeout expired.
    TimedOut,
    /// The poll failed.
    Disconnected,
}

impl Timeouts {
    /// Waits until the socket is readable or has ended.
    pub fn wait(&self, socket: BorrowedFd<'_>) -> Result<(), WaitError> {
        let left = self.deadline.saturating_duration_since(Instant::now()).min(self.idle);
        if left.is_zero() {
            return Err(WaitError::TimedOut);
        }
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
        match rustix::io::retry_on_intr(|| poll(&mut fds, Some(&left))) {
            Ok(0) => Err(WaitError::TimedOut),
            Ok(_) => Ok(()),
            Err(_) => Err(WaitError::Disconnected),
        }
    }
}
