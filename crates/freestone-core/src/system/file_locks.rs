//! File locks, and the list of files that this process has open.
//!
//! Every file is locked in two ways. Freestone processes check a `flock`: exclusive for writers, shared for
//! readers. qemu checks OFD locks on single bytes: byte 100 + n if permission n is in use, byte 200 + n if
//! permission n is not shared with others. All byte locks are shared locks; a process detects the lock of
//! another process by testing for an exclusive lock. A process first locks its own bytes and then tests the
//! others, so of two concurrent openers at least one sees the other.
#![expect(unsafe_code)]
// UNSAFETY: calls `fcntl` with a `struct flock`, because rustix has no open-file-description locks.

use std::collections::HashMap;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use rustix::fs::{FlockOperation, Stat, flock};
use rustix::io::Errno;

use crate::sync::{LazyLock, Mutex};

/// Offset in the file of the first lock byte of qemu's permissions in use.
const USED_FIRST_BYTE: i64 = 100;
/// Offset in the file of the first lock byte of qemu's permissions that are not shared with others.
const UNSHARED_FIRST_BYTE: i64 = 200;
/// Exclusive end of the bytes that qemu may lock.
const END_BYTE: i64 = 264;

// qemu's permission numbers (`BLK_PERM_*`).
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// Access mode of an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading. Other processes may read the file; no process may write it.
    Read,
    /// Reading and writing. No other process may use the file.
    Write,
}

impl Access {
    const fn used(self) -> &'static [i64] {
        match self {
            Self::Read => &[CONSISTENT_READ],
            Self::Write => &[CONSISTENT_READ, WRITE],
        }
    }

    const fn unshared(self) -> &'static [i64] {
        match self {
            Self::Read => &[WRITE, RESIZE],
            Self::Write => &[CONSISTENT_READ, WRITE, RESIZE],
        }
    }
}

/// Locks a file until the file is closed or [`unlock`]ed.
///
/// # Errors
/// [`Errno::WOULDBLOCK`] if the file is in use by another program or by this process; otherwise the error of
/// the system. No lock remains after an error.
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
            // Some file systems lack byte locks. Continue without: the flock still excludes other Freestone
            // processes.
            tracing::warn!(%errno, "file system lacks byte locks; qemu processes are not excluded from the file");
            Ok(())
        }
        Err(errno) => {
            unlock(fd);
            Err(errno)
        }
    }
}

fn lock_bytes(fd: BorrowedFd<'_>, access: Access) -> rustix::io::Result<()> {
    let (used, unshared) = (access.used().iter(), access.unshared().iter());
    for byte in used.map(|n| USED_FIRST_BYTE + n).chain(unshared.map(|n| UNSHARED_FIRST_BYTE + n)) {
        set_lock(fd, libc::F_RDLCK, byte, 1)?;
    }
    let unshared_by_others = access.used().iter().map(|n| UNSHARED_FIRST_BYTE + n);
    let used_by_others = access.unshared().iter().map(|n| USED_FIRST_BYTE + n);
    for byte in unshared_by_others.chain(used_by_others) {
        if is_locked(fd, byte)? {
            return Err(Errno::WOULDBLOCK);
        }
    }
    Ok(())
}

/// Releases the locks of a file. Useful if a request in flight keeps the file open for longer.
pub fn unlock(fd: BorrowedFd<'_>) {
    // Errors are ignored, because closing the file releases the locks, too.
    let _ = set_lock(fd, libc::F_UNLCK, USED_FIRST_BYTE, END_BYTE - USED_FIRST_BYTE);
    let _ = flock(fd, FlockOperation::Unlock);
}

fn range(kind: i32, first: i64, len: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: first,
        l_len: len,
        // OFD locks require a process id of 0.
        l_pid: 0,
    }
}

fn set_lock(fd: BorrowedFd<'_>, kind: i32, first: i64, len: i64) -> rustix::io::Result<()> {
    let range = range(kind, first, len);
    // SAFETY: the descriptor is open, and the kernel only reads the structure, which lives until
    // the call returns.
    let status = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    if status == 0 {
        return Ok(());
    }
    Err(match last_error() {
        // POSIX allows both EACCES and EAGAIN for a conflicting lock.
        Errno::ACCESS => Errno::WOULDBLOCK,
        errno => errno,
    })
}

/// Locks one byte of a file exclusively until the file is closed.
///
/// # Errors
/// [`Errno::WOULDBLOCK`] if another open file holds a lock on the byte.
pub fn lock_byte(fd: BorrowedFd<'_>, byte: i64) -> rustix::io::Result<()> {
    set_lock(fd, libc::F_WRLCK, byte, 1)
}

/// Returns true if another open file description holds a lock on the byte.
fn is_locked(fd: BorrowedFd<'_>, byte: i64) -> rustix::io::Result<bool> {
    let mut range = range(libc::F_WRLCK, byte, 1);
    // SAFETY: the descriptor is open, and the kernel writes nothing but the structure, which lives
    // until the call returns.
    let status = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) };
    if status == 0 { Ok(i32::from(range.l_type) != libc::F_UNLCK) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Number of times that this process has each file open, by device and inode number. Innermost lock, held for
/// a look-up.
static OPEN_FILES: LazyLock<Mutex<HashMap<(u64, u64), usize>>> = LazyLock::new(Mutex::default);

/// Registration of an open file. Unregisters the file on drop.
#[derive(Debug)]
pub struct FileRegistration((u64, u64));

impl FileRegistration {
    /// Registers an open file by the device and inode numbers in `stat`.
    pub fn new(stat: &Stat) -> Self {
        let file = (stat.st_dev, stat.st_ino);
        *OPEN_FILES.lock().entry(file).or_default() += 1;
        Self(file)
    }
}

impl Drop for FileRegistration {
    fn drop(&mut self) {
        let mut open_files = OPEN_FILES.lock();
        if let Some(count) = open_files.get_mut(&self.0) {
            *count -= 1;
            if *count == 0 {
                open_files.remove(&self.0);
            }
        }
    }
}

/// Returns true if this process has the file open under any path.
pub fn is_registered(stat: &Stat) -> bool {
    OPEN_FILES.lock().contains_key(&(stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn failed_lock_returns_error_and_locks_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // The kernel grants no shared byte lock on a descriptor without read access.
        let write_only = File::options().write(true).open(file.path()).unwrap();
        assert_eq!(lock(write_only.as_fd(), Access::Write), Err(Errno::BADF));
        assert_eq!(lock(file.as_file().as_fd(), Access::Write), Ok(()));
    }
}
