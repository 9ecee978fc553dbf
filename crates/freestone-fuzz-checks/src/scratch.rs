//! A file for what can only be opened by its path; in memory where there is a place for that.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// One file in a directory of its own.
pub struct Scratch {
    _directory: TempDir,
    path: PathBuf,
}

impl Scratch {
    /// A place without a file.
    ///
    /// # Panics
    /// There is no directory for it.
    #[allow(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let directory = directory.expect("a directory for a file");
        let path = directory.path().join("file");
        Self { _directory: directory, path }
    }

    /// The file with this content: a new one each time, as files are known by what they are.
    ///
    /// # Panics
    /// It cannot be written.
    pub fn file(&self, content: &[u8]) -> &Path {
        let _ = fs::remove_file(&self.path);
        fs::write(&self.path, content).expect("the file is written");
        &self.path
    }

    /// A place beside it.
    pub fn beside(&self) -> PathBuf {
        self.path.with_extension("other")
    }
}
