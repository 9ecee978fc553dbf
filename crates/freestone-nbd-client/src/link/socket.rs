//! Non-blocking socket calls.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

/// Receives up to `buf.len()` bytes. Returns 0 if the peer has closed the connection, and `None` if
/// no data is available.
pub fn receive(socket: BorrowedFd<'_>, buf: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        return match recv(socket, &mut *buf, RecvFlags::DONTWAIT) {
            Ok((n, _)) => Ok(Some(n)),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Ok(None),
            Err(errno) => Err(errno.into()),
        };
    }
}

/// Sends as much as possible without blocking. Returns the number of bytes, which may be 0.
pub fn send(socket: BorrowedFd<'_>, parts: &[IoSlice<'_>]) -> io::Result<usize> {
    loop {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        return match sendmsg(socket, parts, &mut SendAncillaryBuffer::default(), flags) {
            Ok(n) => Ok(n),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Ok(0),
            Err(errno) => Err(errno.into()),
        };
    }
}
