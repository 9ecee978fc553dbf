//! Descriptions of kept devices, and results of saves.

use std::time::SystemTime;

use crate::save::Contents;

/// Policy for damaged files of kept devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DamagePolicy {
    /// Opening the directory fails. Only the end of the newest file may be missing: that save was
    /// incomplete, and the previous save is used.
    #[default]
    Refuse,
    /// Use the newest save before the damaged files, if any. Everything but page data is checked.
    UseOlder,
}

/// Description of the devices kept in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeepContents {
    /// The saved devices, and what is required to restore them. `pages` counts those of the newest
    /// file.
    pub contents: Contents,
    /// Time at which the devices held this content.
    pub saved_at: SystemTime,
    /// Size of all files of the chain in bytes.
    pub file_bytes: u64,
    /// Number of increments after the whole file.
    pub increments: usize,
    /// Number of newer files that cannot be used.
    pub unusable_files: usize,
}

/// Kind of file that a save writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveKind {
    /// A whole file with all content of the devices.
    Whole,
    /// An increment with the changes since the previous save.
    Increment,
    /// No file, as the devices did not change.
    Unchanged,
}

/// Result of a save that is complete and durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepReport {
    /// Kind of file that the save wrote.
    pub kind: SaveKind,
    /// Number of pages in the file.
    pub pages: u64,
    /// Number of pages in the file that are marked as lost, as they could not be read.
    pub lost: u64,
    /// Size of the file in bytes; 0 if no file was written.
    pub file_bytes: u64,
    /// Time at which the devices held the saved content.
    pub saved_at: SystemTime,
}

/// Estimate of the next save, for a check of the free space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SaveEstimate {
    /// Expected kind of the save. Later events may require a whole file instead of an increment.
    pub kind: SaveKind,
    /// Expected size in bytes of the new file. Free space is needed for it beside the old files,
    /// which are removed only when it is complete.
    pub bytes: u64,
    /// Free bytes of the directory's file system.
    pub free_bytes: u64,
}

impl SaveEstimate {
    /// Returns true if the expected file fits in the free space.
    pub fn fits(&self) -> bool {
        self.bytes <= self.free_bytes
    }
}
