//! Words that several kinds have: keys, names of other devices, and what is said of a device that does
//! not do for something.

use super::Entry;
use crate::entries::check_name;
use crate::keys::joined;
use crate::layers::{FAULT_KEYS, ZONE_KEYS};

/// What those take that can have layers.
pub(super) const LAYER_KEYS: [&str; 18] = joined(&ZONE_KEYS, &FAULT_KEYS, &["publish", "tls_clients"]);
/// Why what is only read is no origin.
pub(super) const IS_READ_ONLY: &str = "is read-only, so it does not change; fork it";
/// Why a snapshot is no origin.
pub(super) const IS_SNAPSHOT: &str = "is a snapshot, which does not change; fork it";

/// The name of a device that is there.
pub(super) fn parse_name(text: &str) -> Result<String, String> {
    match check_name(text) {
        Ok(()) => Ok(text.to_owned()),
        Err(_) => Err("must be the name of a device".into()),
    }
}

/// Why a device that changes is no base.
pub(super) fn is_live(base: &Entry) -> String {
    format!("is live; take a snapshot and fork that: freestone snapshot {} NAME", base.name())
}
