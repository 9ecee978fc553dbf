//! Text stored with a file in extended attributes `user.freestone.*`, if the file system supports
//! them. Block devices do not have such attributes.

use std::io;

use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr, fstat, fsync};
use rustix::io::Errno;

use super::File;
use super::open::modified;

/// Maximum length of an attribute value, in bytes.
const XATTR_BYTES_MAX: usize = 8192;

impl File {
    /// Returns the value of the extended attribute `user.freestone.NAME`; `None` if the attribute
    /// does not exist or the file system does not support attributes.
    ///
    /// # Errors
    /// The system's error if the attribute cannot be read.
    /// [`InvalidData`](io::ErrorKind::InvalidData) if the value is longer than 8192 bytes or not
    /// UTF-8.
    pub fn xattr(&self, name: &str) -> io::Result<Option<String>> {
        let mut text = vec![0; XATTR_BYTES_MAX];
        match fgetxattr(&self.backing.fd, attribute(name), &mut text[..]) {
            Ok(len) => text.truncate(len),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(None),
            Err(Errno::RANGE) => return Err(io::ErrorKind::InvalidData.into()),
            Err(errno) => return Err(errno.into()),
        }
        String::from_utf8(text).map(Some).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// Sets the extended attribute `user.freestone.NAME` durably. Blocks until the file is synced.
    ///
    /// # Errors
    /// Fails if the file system does not support attributes or has no space, or if the sync fails.
    pub fn set_xattr(&self, name: &str, text: &str) -> io::Result<()> {
        fsetxattr(&self.backing.fd, attribute(name), text.as_bytes(), XattrFlags::empty())?;
        Ok(fsync(&self.backing.fd)?)
    }

    /// Returns the current modification time (nanoseconds since 1970) and size in bytes; `None` if
    /// they cannot be read.
    pub fn modified(&self) -> Option<(i128, u64)> {
        modified(&fstat(&self.backing.fd).ok()?)
    }

    /// Returns the modification time (nanoseconds since 1970) and size in bytes that the file had
    /// before it was opened.
    pub fn modified_at_open(&self) -> Option<(i128, u64)> {
        self.backing.modified_at_open
    }

    /// Removes the extended attribute `user.freestone.NAME` durably, if it exists. Blocks until the
    /// file is synced.
    pub fn remove_xattr(&self, name: &str) -> io::Result<()> {
        match fremovexattr(&self.backing.fd, attribute(name)) {
            Ok(()) => Ok(fsync(&self.backing.fd)?),
            Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::PERM) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn attribute(name: &str) -> String {
    format!("user.freestone.{name}")
}
