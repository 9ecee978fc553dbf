//! The access path of an export into its device, and the description that NBD clients see.

use std::sync::Arc;

use freestone::device::Device;
use freestone_nbd::Address;
use freestone_spec::kinds::Entry;
use tracing::warn;

use crate::export_limits::ExportLimits;

/// Returns a new access path into a device for the export at an address, or None for a template.
pub(super) fn access_path(
    entry: &Entry,
    at: &Address,
    limited: Option<&Arc<ExportLimits>>,
) -> Option<Arc<dyn Device>> {
    let counting = entry.new_access_path()?;
    counting.tally().set_address(&at.absolute().to_string());
    if let Some(Err(error)) = limited.map(|limited| limited.join(&counting)) {
        warn!(
            "{}: {at}: the limits of the export are not enforced: cannot start a thread: {error}",
            entry.name()
        );
    }
    Some(counting)
}

/// Returns the description of an export for NBD clients.
pub(super) fn description(entry: &Entry) -> String {
    format!("freestone {} device", entry.kind.name())
}
