//! Parsing and checking of device words and configuration files, without opening anything. For the
//! fuzz checks; not part of the crate's interface.

use std::path::Path;

use crate::config;
use crate::entries::Entries;
use crate::kinds::Spec;

/// A parsed device: name, kind, keys and values.
pub type ParsedDevice = (String, String, Vec<(String, String)>);
/// A parsed device, and the error message of its check.
pub type CheckedDevice = (ParsedDevice, Result<(), String>);

fn checked(entries: Entries) -> CheckedDevice {
    let parsed = (entries.name.clone(), entries.kind.clone(), entries.pairs.clone());
    let spec = Spec::from_entries(entries.with_base(Path::new("/base")));
    (parsed, spec.map(|_| ()).map_err(|error| error.to_string()))
}

/// Parses a device of a command line, and checks its kind, keys and values.
///
/// # Errors
/// Returns the error message if parsing fails.
pub fn device_words(text: &str) -> Result<CheckedDevice, String> {
    Entries::parse(text).map(checked).map_err(|error| error.to_string())
}

/// Parses a configuration file of `serve --config`, and checks each of its devices.
///
/// # Errors
/// Returns the error message if parsing fails.
pub fn config_file(text: &str) -> Result<Vec<CheckedDevice>, String> {
    Ok(config::parse(text)?.devices.into_iter().map(|device| checked(device.entries)).collect())
}
