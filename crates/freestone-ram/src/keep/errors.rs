use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::save::{RestoreError, SaveError};
use freestone_core::file_size_limit::Explained;

/// Errors of keeping devices.
#[derive(Debug, Error)]
pub enum KeepError {
    /// The directory cannot be created, read or changed.
    #[error("cannot use {}: {}", path.display(), Explained(source))]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The directory is in use by this or another process.
    #[error("{} is in use; one server keeps devices in it at a time", .0.display())]
    InUse(PathBuf),
    /// The directory is empty.
    #[error("{} holds nothing yet", .0.display())]
    Nothing(PathBuf),
    /// A file cannot be read, or the devices cannot be created.
    #[error(transparent)]
    Read(#[from] RestoreError),
    /// The devices cannot be saved, or the files cannot be merged.
    #[error(transparent)]
    Save(#[from] SaveError),
}
