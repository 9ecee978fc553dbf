//! Why devices could not be kept.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::save::{RestoreError, SaveError};
use freestone_core::file_size_limit::Explained;

/// Why something could not be done with kept devices.
#[derive(Debug, Error)]
pub enum KeepError {
    /// The directory could not be made, read, or changed.
    #[error("cannot use {}: {}", path.display(), Explained(source))]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another one has it open, here or in another process.
    #[error("{} is in use; one server keeps devices in it at a time", .0.display())]
    InUse(PathBuf),
    /// Nothing was saved there yet.
    #[error("{} holds nothing yet", .0.display())]
    Nothing(PathBuf),
    /// A file of it could not be read, or the devices not made.
    #[error(transparent)]
    Read(#[from] RestoreError),
    /// The devices could not be saved, or files not merged.
    #[error(transparent)]
    Save(#[from] SaveError),
}
