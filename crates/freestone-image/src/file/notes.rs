//! Notes: text stored with a file in `user.freestone.*` extended attributes, if the file system
//! supports them. Block devices have none.

use std::io;

use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr, fstat, fsync};
use rustix::io::Errno;

use super::File;
use super::open::modified;

/// Longest note in bytes.
const NOTE_BYTES_MAX: usize = 8192;

impl File {
    /// Returns the text of the note `name` (attribute `user.freestone.NAME`). Returns `None` if the
    /// attribute does not exist or the file system does not support attributes.
    ///
    /// # Errors
    /// The system's error if the attribute cannot be read.
    /// [`InvalidData`](io::ErrorKind::InvalidData) if the note is longer than 8192 bytes or not
    /// UTF-8.
    pub fn note(&self, name: &str) -> io::Result<Option<String>> {
        let mut text = vec![0; NOTE_BYTES_MAX];
        match fgetxattr(&self.backing.fd, attribute(name), &mut text[..]) {
            Ok(len) => text.truncate(len),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(None),
            Err(Errno::RANGE) => return Err(io::ErrorKind::InvalidData.into()),
            Err(errno) => return Err(errno.into()),
        }
        String::from_utf8(text).map(Some).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// Sets a note durably. Blocks.
    ///
    /// # Errors
    /// The file system does not support attributes or has no space.
    pub fn set_note(&self, name: &str, text: &str) -> io::Result<()> {
        fsetxattr(&self.backing.fd, attribute(name), text.as_bytes(), XattrFlags::empty())?;
        Ok(fsync(&self.backing.fd)?)
    }

    /// Returns the modification time in nanoseconds since 1970 and the size in bytes; `None` if
    /// they cannot be read.
    pub fn modified(&self) -> Option<(i128, u64)> {
        modified(&fstat(&self.backing.fd).ok()?)
    }

    /// Returns the modification time and size that the file had before it was opened.
    pub fn found(&self) -> Option<(i128, u64)> {
        self.backing.modified_at_open
    }

    /// Removes a note durably, if it exists. Blocks.
    ///
    /// # Errors
    /// The system's error.
    pub fn remove_note(&self, name: &str) -> io::Result<()> {
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
