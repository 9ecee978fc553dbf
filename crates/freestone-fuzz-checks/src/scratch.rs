//! A temporary file for code that opens files by path. The file is on `/dev/shm` if that directory exists.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// A temporary file in a directory of its own, which is deleted on drop.
pub struct Scratch {
    _directory: TempDir,
    path: PathBuf,
}

impl Scratch {
    /// Creates the directory. The file does not exist yet.
    ///
    /// # Panics
    /// Panics if the directory cannot be created.
    #[allow(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let directory = directory.expect("a directory for a file");
        let path = directory.path().join("file");
        Self { _directory: directory, path }
    }

    /// Creates or replaces the file with the given content. Each call creates a new inode, because open files
    /// are identified by their inodes.
    ///
    /// # Panics
    /// Panics if the file cannot be written.
    pub fn file(&self, content: &[u8]) -> &Path {
        let _ = fs::remove_file(&self.path);
        fs::write(&self.path, content).expect("the file is written");
        &self.path
    }

    /// Returns the path of a second file in the same directory.
    pub fn beside(&self) -> PathBuf {
        self.path.with_extension("other")
    }
}
