//! The access path of an export into its device, and the description that NBD clients see.

use std::sync::Arc;

use freestone::device::Device;
use freestone_nbd::Address;
use freestone_spec::kinds::Entry;
use tracing::warn;

use crate::limited::Limited;

/// Returns a new access path into a device for the export at an address, or None for a template.
pub(super) fn access_path(
    entry: &Entry,
    at: &Address,
    limited: Option<&Arc<Limited>>,
) -> Option<Arc<dyn Device>> {
    let way = entry.way()?;
    way.tally().set_place(&at.absolute().to_string());
    if let Some(Err(error)) = limited.map(|limited| limited.join(&way)) {
        warn!(
            "{}: {at}: the limits of the export are not enforced: cannot start a thread: {error}",
            entry.name()
        );
    }
    Some(way)
}

/// Returns the description of an export for NBD clients.
pub(super) fn description(entry: &Entry) -> String {
    format!("freestone {} device", entry.kind.name())
}
