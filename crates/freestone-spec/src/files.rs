//! Files behind devices: how they are opened, and what is said where they are not.

use freestone::file::{self, File};

use crate::refusal::{Errno, Refusal};
use crate::size::exact;

/// Opens a file whose size was asked for under `key`.
pub fn open(config: &file::Config, key: &str) -> Result<File, Refusal> {
    File::open(config).map_err(|e| Refusal::failed(errno_of(&e), in_typed_sizes(key, &e)))
}

/// The errno of a file that could not be opened.
pub fn errno_of(error: &file::SetupError) -> Errno {
    match error {
        file::SetupError::InUse { .. } => Errno::EBUSY,
        file::SetupError::Call { source, .. } => Errno::of_file(source),
        _ => Errno::EIO,
    }
}

/// The library says sizes in bytes; here they are typed with units, under `key`.
pub fn in_typed_sizes(key: &str, error: &file::SetupError) -> String {
    match error {
        file::SetupError::SizeDiffers { path, found, asked } => {
            let (path, found, asked) = (path.display(), exact(*found), exact(*asked));
            format!("{key}={asked}: {path} has {found}; leave {key} out to take the file as it is")
        }
        other => other.to_string(),
    }
}
