//! Fault injection for system calls. Tests make the nth call of a kind on the calling thread fail, before or
//! after it takes effect. Without debug assertions [`call`] only executes the call.
//!
//! Callers wrap the calls whose failure leaves an effect visible or unknown: those that make files
//! durable, give them names, and read them back.

use std::io;

#[cfg(debug_assertions)]
use rustix::io::Errno;

/// The kind of a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// `open` of a directory, for its fsync.
    OpenDir,
    /// `fsync` of a directory.
    SyncDir,
    /// `fsync` of a new file.
    SyncFile,
    /// `linkat` or `rename` that gives a complete file its final name.
    Place,
    /// `open` of a file that exists.
    Open,
    /// `pread` of a file's metadata structures.
    Read,
    /// `pread` of data in a file.
    ReadData,
}

/// A failure to inject.
#[cfg(debug_assertions)]
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    /// The kind of system call that fails.
    pub call: Call,
    /// Number of calls of this kind that succeed before the first failure.
    pub after: u32,
    /// Number of calls that fail after those that succeed.
    pub times: u32,
    /// The error that the call returns.
    pub errno: Errno,
    /// True if the call takes effect although it returns the error.
    pub is_done: bool,
}

#[cfg(debug_assertions)]
thread_local! {
    static FAULT: std::cell::Cell<Option<Fault>> = const { std::cell::Cell::new(None) };
}

/// Replaces the calling thread's fault. Returns the old fault with its remaining counts.
#[cfg(debug_assertions)]
pub fn inject(fault: Option<Fault>) -> Option<Fault> {
    FAULT.replace(fault)
}

/// Runs a system call, or returns the injected error if the calling thread's fault applies.
///
/// # Errors
/// Errors of the system call, or the injected error.
pub fn call<R>(kind: Call, run: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
    #[cfg(debug_assertions)]
    if let Some(fault) = FAULT.get().filter(|fault| fault.call == kind && fault.times > 0) {
        if fault.after > 0 {
            FAULT.set(Some(Fault { after: fault.after - 1, ..fault }));
        } else {
            FAULT.set(Some(Fault { times: fault.times - 1, ..fault }));
            if fault.is_done {
                run()?;
            }
            return Err(fault.errno.into());
        }
    }
    let _ = kind;
    run()
}
