//! What a file says of itself, beside its data: extended attributes, where the file system has
//! them. Block devices have none.

use std::io;

use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr, fstat, fsync};
use rustix::io::Errno;

use super::File;
use super::open::modified;

/// The longest note in bytes.
const NOTE_BYTES_MAX: usize = 8192;

impl File {
    /// Returns the text of a note, the attribute `user.freestone.NAME`; `None` if the file has no
    /// such attribute or the file system has no attributes.
    ///
    /// # Errors
    /// The note exists or may exist, and cannot be read: the system's error, or
    /// [`InvalidData`](io::ErrorKind::InvalidData) for a note that is not text of at most 8192
    /// bytes.
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
    /// The file system has no such attributes, or no room.
    pub fn set_note(&self, name: &str, text: &str) -> io::Result<()> {
        fsetxattr(&self.backing.fd, attribute(name), text.as_bytes(), XattrFlags::empty())?;
        Ok(fsync(&self.backing.fd)?)
    }

    /// When the file was modified last, in nanoseconds since 1970, and its size in bytes; `None`
    /// where it cannot be asked.
    pub fn modified(&self) -> Option<(i128, u64)> {
        modified(&fstat(&self.backing.fd).ok()?)
    }

    /// The same as it was before the file was opened.
    pub fn found(&self) -> Option<(i128, u64)> {
        self.backing.found
    }

    /// Takes a note away durably, if it is there. Blocks.
    ///
    /// # Errors
    /// The file system's.
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
