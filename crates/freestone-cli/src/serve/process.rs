//! Resource limits and I/O flusher state of this process.

use std::io;
use std::process::{Child, Command};
use std::sync::Arc;

use rustix::process::{Resource, Rlimit, configure_io_flusher_behavior};
use signal_hook::consts::SIGXFSZ;
use signal_hook::flag;

/// Raises the soft limit of open files to the hard limit: a thousand clients need more than the usual 1024.
/// Returns the former soft limit, or `None` if the limit is unchanged.
pub fn raise_open_files() -> Option<u64> {
    let Rlimit { current, maximum } = rustix::process::getrlimit(Resource::Nofile);
    let former = current?;
    if maximum.is_some_and(|most| former >= most) {
        return None;
    }
    // A failure leaves the limit unchanged.
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).ok()?;
    Some(former)
}

/// Makes a write beyond `RLIMIT_FSIZE` fail with EFBIG instead of ending the process. Installs a handler for
/// SIGXFSZ instead of `SIG_IGN`, so that child programs get the default action.
///
/// # Errors
/// Fails if the handler cannot be installed.
pub fn survive_file_size_limit() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// Makes this thread, and all threads that it starts later, I/O flushers (`PR_SET_IO_FLUSHER`). For such
/// threads the kernel allocates memory without writing to a disk, which could be a device of this server. The
/// kernel throttles their writes only by the state of the target disk. Needs `CAP_SYS_RESOURCE`; does nothing
/// without.
///
/// Must be called before other threads exist, because a thread can set only its own state. Waiting for the
/// first ublk export would be too late: a kernel mount of an NBD export needs the state as well.
pub fn become_io_flusher() {
    let _ = configure_io_flusher_behavior(true);
}

/// Starts a child program without the I/O flusher state: the program uses disks but does not serve them.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    let _ = configure_io_flusher_behavior(false);
    let child = command.spawn();
    become_io_flusher();
    child
}
