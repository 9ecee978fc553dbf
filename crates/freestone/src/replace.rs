//! Files that are written beside their place until they are complete and durable, and then put there: what stands there is the
//! old file or the new one at any moment, also after a crash (which may leave the unfinished file beside).

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// The place of a file that is to be replaced, or made.
pub struct Place {
    /// Absolute, and no symbolic link.
    pub path: PathBuf,
    /// The directory.
    pub dir: PathBuf,
}

impl Place {
    /// The place `to`, where a regular file is, or nothing.
    pub fn new(to: &Path) -> io::Result<Self> {
        let path = match fs::metadata(to) {
            Ok(found) if found.is_file() => fs::canonicalize(to)?,
            Ok(_) => return Err(io::Error::other("there is something else than a file")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let name = to.file_name().ok_or_else(|| io::Error::other("this is no file name"))?;
                let dir = to.parent().filter(|dir| !dir.as_os_str().is_empty());
                fs::canonicalize(dir.unwrap_or(Path::new(".")))?.join(name)
            }
            Err(error) => return Err(error),
        };
        let dir = path.parent().map_or_else(|| PathBuf::from("/"), Path::to_owned);
        Ok(Self { path, dir })
    }

    /// A file beside, whose name begins with `prefix`, for this process's user alone; it is gone when it is dropped.
    pub fn begin(&self, prefix: &str) -> io::Result<NamedTempFile> {
        tempfile::Builder::new().prefix(prefix).suffix(".tmp").tempfile_in(&self.dir)
    }

    /// Makes it durable, and puts it in the old one's place.
    pub fn put(&self, unfinished: NamedTempFile) -> io::Result<()> {
        unfinished.as_file().sync_all()?;
        unfinished.persist(&self.path).map_err(|error| error.error)?;
        self.keep_name()
    }

    /// Makes it durable that the file has this name.
    pub fn keep_name(&self) -> io::Result<()> {
        File::open(&self.dir)?.sync_all()
    }
}
