//! Calls of a socket that do not wait.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

/// What is there, up to the length of `buf`; 0 where the peer has closed. `None`: nothing is.
///
/// # Errors
/// The connection is lost.
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

/// Sends as much as goes, 0 where that is nothing now.
///
/// # Errors
/// The connection is lost.
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
