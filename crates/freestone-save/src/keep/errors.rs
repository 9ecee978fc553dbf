use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::save::{RestoreError, SaveError};
use freestone_core::file_size_limit::WriteErrorText;

/// Errors of the directory of kept devices.
#[derive(Debug, Error)]
pub enum KeepError {
    /// The directory cannot be created, read or changed.
    #[error("cannot use {}: {}", path.display(), WriteErrorText(source))]
    Directory {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// The directory is in use by this process or another one.
    #[error("{} is in use; one server keeps devices in it at a time", .0.display())]
    InUse(PathBuf),
    /// The directory does not contain kept devices.
    #[error("{} holds nothing yet", .0.display())]
    Empty(PathBuf),
    /// A file of the chain cannot be read, or the devices cannot be created.
    #[error(transparent)]
    Read(#[from] RestoreError),
    /// The devices cannot be saved, or the files of the chain cannot be merged.
    #[error(transparent)]
    Save(#[from] SaveError),
}
