//! Errors of the state directory.

use std::io;
use std::path::PathBuf;

use freestone_core::file_size_limit::WriteErrorText;
use thiserror::Error;

use crate::lines;

/// Errors from opening or updating the state directory.
#[derive(Debug, Error)]
pub enum StateError {
    /// The state directory cannot be created, opened or read.
    #[error("cannot use state directory {}: {}", .0.display(), WriteErrorText(.1))]
    Directory(PathBuf, #[source] io::Error),
    /// Another server uses the state directory.
    #[error("state directory {} is in use by another server", .0.display())]
    InUse(PathBuf),
    /// The file with the name of the topology file belongs to another program.
    #[error("{}: not a state file of this program", .0.display())]
    Foreign(PathBuf),
    /// A later version of the program wrote the file. Contains the format version of the file.
    #[error("{}: format version {} is newer than {}, the latest that this program supports", .0.display(), .1, lines::VERSION)]
    Newer(PathBuf, u32),
    /// A line of the file that was already durable has changed. Contains the number of that line.
    #[error("{}: line {} is damaged; the lines before it are intact", .0.display(), .1)]
    Damaged(PathBuf, usize),
    /// The topology file cannot be written. The next change tries again.
    #[error("cannot write {}: {}", .0.display(), WriteErrorText(.1))]
    Write(PathBuf, #[source] io::Error),
}
