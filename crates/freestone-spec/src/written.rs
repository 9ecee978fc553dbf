//! What people write, for the checks of very many inputs: up to where files would be opened. No
//! part of the library's interface.

use std::path::Path;

use crate::config;
use crate::entries::Entries;
use crate::kinds::Spec;

/// A device as it was written: name, kind, keys and values.
pub type Written = (String, String, Vec<(String, String)>);
/// The same, and whether it can be meant; else a sentence.
pub type Checked = (Written, Result<(), String>);

fn checked(entries: Entries) -> Checked {
    let written = (entries.name.clone(), entries.kind.clone(), entries.pairs.clone());
    let spec = Spec::from_entries(entries.with_base(Path::new("/base")));
    (written, spec.map(|_| ()).map_err(|error| error.to_string()))
}

/// Takes one device of a command line apart, and checks its kind, keys and values.
///
/// # Errors
/// A sentence: it cannot be taken apart.
pub fn device_words(text: &str) -> Result<Checked, String> {
    Entries::parse(text).map(checked).map_err(|error| error.to_string())
}

/// Takes a file of `serve --config` apart, and checks each of its devices.
///
/// # Errors
/// A sentence: it cannot be taken apart.
pub fn config_file(text: &str) -> Result<Vec<Checked>, String> {
    Ok(config::parse(text)?.devices.into_iter().map(|device| checked(device.entries)).collect())
}
