//! Locks on files, and the list of the files that this process has open.
//!
//! Two kinds of lock are taken on everything that is opened. Freestone sees a `flock`: exclusive
//! for who writes, shared for who reads. qemu sees locks on single bytes: byte 100 + n of who uses
//! permission n, byte 200 + n of who lets nobody else use it. All of these are shared locks; who
//! wants to know whether another has one asks whether an exclusive one could be had. First the own
//! bytes are locked, then the others' looked at, so of two that come at one time at least one sees
//! the other.
#![expect(unsafe_code)]
// UNSAFETY: `fcntl` with a `struct flock`; rustix has no locks that belong to an open file
// description.

use std::collections::HashMap;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use rustix::fs::{FlockOperation, Stat, flock};
use rustix::io::Errno;

use crate::sync::{LazyLock, Mutex};

/// Where qemu's bytes for permissions in use begin.
const USED_FIRST_BYTE: i64 = 100;
/// Where those for permissions that are not shared begin.
const KEPT_FIRST_BYTE: i64 = 200;
/// Behind the last byte of either kind that qemu may lock.
const LAST_BYTE: i64 = 264;

// qemu's permissions, by their number.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// What a file is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Others may read as well, and nobody may write.
    Read,
    /// Nobody else may do anything.
    Write,
}

impl Access {
    const fn used(self) -> &'static [i64] {
        match self {
            Self::Read => &[CONSISTENT_READ],
            Self::Write => &[CONSISTENT_READ, WRITE],
        }
    }

    const fn kept(self) -> &'static [i64] {
        match self {
            Self::Read => &[WRITE, RESIZE],
            Self::Write => &[CONSISTENT_READ, WRITE, RESIZE],
        }
    }
}

/// Locks a file until it is closed, or [`unlock`]ed.
///
/// # Errors
/// [`Errno::WOULDBLOCK`]: it is in use, by another program or here; the system's. Then nothing is
/// locked.
pub fn lock(fd: BorrowedFd<'_>, access: Access) -> rustix::io::Result<()> {
    flock(
        fd,
        match access {
            Access::Read => FlockOperation::NonBlockingLockShared,
            Access::Write => FlockOperation::NonBlockingLockExclusive,
        },
    )?;
    match lock_bytes(fd, access) {
        Ok(()) => Ok(()),
        Err(errno @ (Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL)) => {
            // Not every file system has them, and Freestone can do without.
            tracing::warn!(%errno, "a file cannot be locked as qemu locks files, so qemu is not kept out");
            Ok(())
        }
        // In use, or nobody knows whether it is.
        Err(errno) => {
            unlock(fd);
            Err(errno)
        }
    }
}

fn lock_bytes(fd: BorrowedFd<'_>, access: Access) -> rustix::io::Result<()> {
    let (used, kept) = (access.used().iter(), access.kept().iter());
    for byte in used.map(|n| USED_FIRST_BYTE + n).chain(kept.map(|n| KEPT_FIRST_BYTE + n)) {
        set(fd, libc::F_RDLCK, byte, 1)?;
    }
    let kept_by_others = access.used().iter().map(|n| KEPT_FIRST_BYTE + n);
    let used_by_others = access.kept().iter().map(|n| USED_FIRST_BYTE + n);
    for byte in kept_by_others.chain(used_by_others) {
        if is_locked(fd, byte)? {
            return Err(Errno::WOULDBLOCK);
        }
    }
    Ok(())
}

/// Gives the locks back, also where a request that has just ended keeps the file open for a moment
/// longer.
pub fn unlock(fd: BorrowedFd<'_>) {
    // Nothing can be done about a failure; closing unlocks as well.
    let _ = set(fd, libc::F_UNLCK, USED_FIRST_BYTE, LAST_BYTE - USED_FIRST_BYTE);
    let _ = flock(fd, FlockOperation::Unlock);
}

fn range(kind: i32, first: i64, len: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: first,
        l_len: len,
        // Must be 0 for locks of open file descriptions.
        l_pid: 0,
    }
}

fn set(fd: BorrowedFd<'_>, kind: i32, first: i64, len: i64) -> rustix::io::Result<()> {
    let range = range(kind, first, len);
    // SAFETY: the descriptor is open, and the kernel only reads the structure, which lives until
    // the call returns.
    let set = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    if set == 0 {
        return Ok(());
    }
    Err(match last_error() {
        // POSIX allows either.
        Errno::ACCESS => Errno::WOULDBLOCK,
        errno => errno,
    })
}

/// Locks one byte of a file, which no other open file then has, until this one is closed.
///
/// # Errors
/// [`Errno::WOULDBLOCK`]: somebody else has it.
pub fn lock_byte(fd: BorrowedFd<'_>, byte: i64) -> rustix::io::Result<()> {
    set(fd, libc::F_WRLCK, byte, 1)
}

/// Whether somebody else has a lock on a byte.
fn is_locked(fd: BorrowedFd<'_>, byte: i64) -> rustix::io::Result<bool> {
    let mut range = range(libc::F_WRLCK, byte, 1);
    // SAFETY: the descriptor is open, and the kernel writes nothing but the structure, which lives
    // until the call returns.
    let asked = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) };
    if asked == 0 { Ok(i32::from(range.l_type) != libc::F_UNLCK) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// How often this process has files open, by file system and inode. Lock order: nothing is taken
/// under it; held for a look-up.
static HELD: LazyLock<Mutex<HashMap<(u64, u64), usize>>> = LazyLock::new(Mutex::default);

/// An open file in this process's list, until it is dropped.
#[derive(Debug)]
pub struct Held((u64, u64));

impl Held {
    /// Adds a file.
    pub fn new(stat: &Stat) -> Self {
        let file = (stat.st_dev, stat.st_ino);
        *HELD.lock().entry(file).or_default() += 1;
        Self(file)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut held = HELD.lock();
        if let Some(count) = held.get_mut(&self.0) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.0);
            }
        }
    }
}

/// Whether this process has the file open, by whatever path.
pub fn is_held(stat: &Stat) -> bool {
    HELD.lock().contains_key(&(stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn lock_that_fails_is_an_error_and_locks_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // The kernel gives no shared lock on bytes to who cannot read.
        let written = File::options().write(true).open(file.path()).unwrap();
        assert_eq!(lock(written.as_fd(), Access::Write), Err(Errno::BADF));
        assert_eq!(lock(file.as_file().as_fd(), Access::Write), Ok(()));
    }
}
