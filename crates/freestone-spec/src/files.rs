//! Opening files for devices, and their error messages.

use freestone::file::{self, File};

use crate::refusal::{Errno, Refusal};
use crate::size::exact;

/// Opens a file. `key` is the key of its expected size, for the error message.
pub fn open(config: &file::Config, key: &str) -> Result<File, Refusal> {
    File::open(config).map_err(|e| Refusal::failed(errno_of(&e), error_text(key, &e)))
}

/// Returns the errno for a file that could not be opened.
pub fn errno_of(error: &file::SetupError) -> Errno {
    match error {
        file::SetupError::InUse { .. } => Errno::EBUSY,
        file::SetupError::Call { source, .. } => Errno::of_file(source),
        _ => Errno::EIO,
    }
}

/// Formats an error. Sizes have units, as typed under `key`; the library reports bytes.
pub fn error_text(key: &str, error: &file::SetupError) -> String {
    match error {
        file::SetupError::SizeDiffers { path, found, asked } => {
            let (path, found, asked) = (path.display(), exact(*found), exact(*asked));
            format!("{key}={asked}: {path} has {found}; leave {key} out to take the file as it is")
        }
        other => other.to_string(),
    }
}
