//! Keys, parsers and messages that several kinds of devices use.

use super::Entry;
use crate::entries::check_name;

/// Name of the kind of a restored device that no specification of another kind can describe.
pub const RESTORED: &str = "restored";
/// Reason why a read-only device cannot be an origin.
pub(super) const IS_READ_ONLY: &str = "is read-only, so it does not change; fork it";
/// Reason why a snapshot cannot be an origin.
pub(super) const IS_SNAPSHOT: &str = "is a snapshot, which does not change; fork it";

/// Parses a value that is the name of another device.
pub(super) fn parse_name(text: &str) -> Result<String, String> {
    match check_name(text) {
        Ok(()) => Ok(text.to_owned()),
        Err(_) => Err("must be the name of a device".into()),
    }
}

/// Returns the reason why a writable device cannot be a base: its content changes.
pub(super) fn is_live(base: &Entry) -> String {
    format!("is live; take a snapshot and fork that: freestone snapshot {} NAME", base.name())
}
