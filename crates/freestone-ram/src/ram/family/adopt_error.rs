//! Reasons why a family cannot be adopted.

use rustix::io::Errno;
use thiserror::Error;

use crate::pool::redo::{self, RedoError};
use crate::ram::memory::config::SetupError;
use freestone_core::slot::adoption::AdoptionError;

/// Reasons why a family cannot be adopted.
#[derive(Debug, Error)]
pub enum AdoptError {
    /// A file cannot be used.
    #[error("cannot use a memory file: {0}")]
    File(Errno),
    /// The first file is not one of a family.
    #[error("the memory file is not one of a family of RAM disks")]
    Foreign,
    /// Another version of the program has written the files.
    #[error("the memory has layout {found}; this program knows layout {known}")]
    Layout {
        /// Version of the layout of the files.
        found: u64,
        /// Version that this program knows.
        known: u64,
    },
    /// The content contradicts itself.
    #[error("the memory is damaged: {0}")]
    Damaged(String),
    /// A device reads from one with this key, which neither the family nor the caller has.
    #[error("the base with key {0} is missing")]
    NoBase(u64),
    /// The family cannot be created.
    #[error(transparent)]
    Setup(#[from] SetupError),
}

impl From<RedoError> for AdoptError {
    fn from(error: RedoError) -> Self {
        match error {
            RedoError::File(errno) => Self::File(errno),
            RedoError::Foreign => Self::Foreign,
            RedoError::Layout(found) => Self::Layout { found, known: redo::LAYOUT },
            RedoError::NoMemory => Self::Setup(SetupError::NoMemory),
        }
    }
}

impl From<AdoptionError> for AdoptError {
    fn from(error: AdoptionError) -> Self {
        match error {
            AdoptionError::File(errno) => Self::File(errno),
            AdoptionError::Node(root) => Self::Damaged(format!("slot table {root} refers to a wrong node")),
            AdoptionError::NoMemory => Self::Setup(SetupError::NoMemory),
        }
    }
}
