//! The limit on the size of files that this process writes (`RLIMIT_FSIZE`). A write beyond the limit fails
//! with EFBIG, which devices and verbs report as a lack of space.

use std::fmt;
use std::io::{Error, ErrorKind};

use rustix::process::{Resource, getrlimit};

/// The limit in bytes. Displays as a sentence that names the limit and how to raise it.
pub struct FileSizeLimit(u64);

impl FileSizeLimit {
    /// Returns the limit of this process, or `None` if its files may have any size.
    pub fn of_process() -> Option<Self> {
        getrlimit(Resource::Fsize).current.map(Self)
    }
}

impl fmt::Display for FileSizeLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes) = self;
        write!(
            f,
            "RLIMIT_FSIZE limits files to {bytes} bytes; raise LimitFSIZE= of the service, or ulimit -f"
        )
    }
}

/// An I/O error of a call that writes a file. If the file is too large, the text names the limit.
pub struct WriteErrorText<'a>(pub &'a Error);

impl fmt::Display for WriteErrorText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = FileSizeLimit::of_process().filter(|_| self.0.kind() == ErrorKind::FileTooLarge);
        match limit {
            Some(limit) => write!(f, "{}: {limit}", self.0),
            None => self.0.fmt(f),
        }
    }
}
