//! Where a file goes: beside its place until it is complete and durable, then there.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::SaveError;

/// How a file is named that is not complete yet.
const UNFINISHED_PREFIX: &str = ".freestone-save-";

/// See the module.
pub struct Target {
    /// Absolute, and no symbolic link.
    pub path: PathBuf,
    dir: PathBuf,
}

impl Target {
    pub fn new(to: &Path) -> Result<Self, SaveError> {
        let failed = |source| SaveError::Write { path: to.to_owned(), source };
        let path = match fs::metadata(to) {
            Ok(found) if found.is_file() => fs::canonicalize(to).map_err(failed)?,
            Ok(_) => return Err(failed(io::Error::other("there is something else than a file"))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let name = to.file_name().ok_or_else(|| failed(io::Error::other("this is no file name")))?;
                let dir = to.parent().filter(|dir| !dir.as_os_str().is_empty());
                fs::canonicalize(dir.unwrap_or(Path::new("."))).map_err(failed)?.join(name)
            }
            Err(error) => return Err(failed(error)),
        };
        let dir = path.parent().map_or_else(|| PathBuf::from("/"), Path::to_owned);
        Ok(Self { path, dir })
    }

    /// A file beside, which is gone when it is dropped.
    pub fn begin(&self) -> Result<NamedTempFile, SaveError> {
        let made = tempfile::Builder::new().prefix(UNFINISHED_PREFIX).suffix(".tmp").tempfile_in(&self.dir);
        made.map_err(|source| self.failed(source))
    }

    /// Makes it durable, and puts it in the old one's place.
    pub fn put(&self, unfinished: NamedTempFile) -> Result<(), SaveError> {
        unfinished.as_file().sync_all().map_err(|source| self.failed(source))?;
        unfinished.persist(&self.path).map_err(|error| self.failed(error.error))?;
        File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> SaveError {
        SaveError::Write { path: self.path.clone(), source }
    }
}
