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
    /// The text of a note, an attribute `user.freestone.NAME`; `None` where there is none, or none
    /// can be.
    pub fn note(&self, name: &str) -> Option<String> {
        let mut text = vec![0; NOTE_BYTES_MAX];
        let len = fgetxattr(&self.backing.fd, attribute(name), &mut text[..]).ok()?;
        text.truncate(len);
        String::from_utf8(text).ok()
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
