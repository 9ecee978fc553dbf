//! Opens files for devices, and formats the error messages.

use freestone::file::{self, File};

use crate::refusal::{Errno, Refusal};
use crate::size::exact;

/// Opens a file for a device. `key` is the key of the expected size, which the error message names.
pub fn open(config: &file::Config, key: &str) -> Result<File, Refusal> {
    File::open(config).map_err(|e| Refusal::failed(errno_of(&e), error_text(key, &e)))
}

/// Returns the errno of a failure to open a file.
pub fn errno_of(error: &file::SetupError) -> Errno {
    match error {
        file::SetupError::InUse { .. } => Errno::EBUSY,
        file::SetupError::Call { source, .. } => Errno::of_file(source),
        _ => Errno::EIO,
    }
}

/// Formats the error of a failure to open a file. Sizes are printed with units, as in the value of
/// `key`.
pub fn error_text(key: &str, error: &file::SetupError) -> String {
    match error {
        file::SetupError::SizeMismatch { path, found, asked } => {
            let (path, found, asked) = (path.display(), exact(*found), exact(*asked));
            format!("{key}={asked}: {path} has {found}; leave {key} out to take the file as it is")
        }
        other => other.to_string(),
    }
}
