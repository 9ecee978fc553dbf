//! Parses and checks device specifications without opening anything. Only
//! for fuzz tests; not part of the crate's interface.

use std::path::Path;

use crate::entries::Entries;
use crate::kinds::Spec;

/// Parsed device specification: name, kind, and pairs of key and value.
pub type ParsedDevice = (String, String, Vec<(String, String)>);
/// Parsed device specification, and the result of checking it: `Ok`, or the error message.
pub type CheckedDevice = (ParsedDevice, Result<(), String>);

/// Checks a parsed specification.
pub fn checked(entries: Entries) -> CheckedDevice {
    let parsed = (entries.name.clone(), entries.kind.clone(), entries.pairs.clone());
    let spec = Spec::from_entries(entries.with_base(Path::new("/base")));
    (parsed, spec.map(|_| ()).map_err(|error| error.to_string()))
}

/// Parses a device specification of a command line, and checks the kind, keys and values.
pub fn device_words(text: &str) -> Result<CheckedDevice, String> {
    Entries::parse(text).map(checked).map_err(|error| error.to_string())
}
