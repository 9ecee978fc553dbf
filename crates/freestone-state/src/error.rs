//! Errors of the state directory.

use std::io;
use std::path::PathBuf;

use freestone_core::file_size_limit::Explained;
use thiserror::Error;

use crate::lines;

/// Errors from opening or updating the state directory.
#[derive(Debug, Error)]
pub enum StateError {
    /// The directory cannot be created, opened or read.
    #[error("{}: cannot be used as the state of a server: {}", .0.display(), Explained(.1))]
    Directory(PathBuf, #[source] io::Error),
    /// Another server uses the directory.
    #[error("{}: is the state of another server that runs", .0.display())]
    InUse(PathBuf),
    /// The file is of another program.
    #[error("{}: is no state of a server", .0.display())]
    Foreign(PathBuf),
    /// The file is of a later version of the program.
    #[error("{}: has version {} of the format, and this program knows {} only", .0.display(), .1, lines::VERSION)]
    Newer(PathBuf, u32),
    /// A line that was durable has changed.
    #[error("{}: line {} is damaged; the lines before it are whole", .0.display(), .1)]
    Damaged(PathBuf, usize),
    /// The file cannot be written. The next change tries again.
    #[error("{}: cannot be written: {}", .0.display(), Explained(.1))]
    Write(PathBuf, #[source] io::Error),
}
