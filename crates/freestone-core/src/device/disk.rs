//! A named device, as exports see it.

use std::fmt;

use super::{Device, Error, FailureKind, Failures};
use crate::sync::Arc;

/// A named device, with its failure counters.
pub struct Disk {
    /// Name of the device.
    pub name: String,
    /// The device itself.
    pub device: Arc<dyn Device>,
    /// True if an option or the device itself makes the disk read-only.
    pub read_only: bool,
    /// Counters of the device's failed requests.
    pub failures: Arc<Failures>,
}

impl Disk {
    /// Creates a disk. The disk is read-only if `read_only` is true or the device is read-only.
    pub fn new(name: &str, read_only: bool, device: Arc<dyn Device>, failures: Arc<Failures>) -> Self {
        let read_only = read_only || device.geometry().read_only;
        Self { name: name.to_owned(), device, read_only, failures }
    }

    /// Counts a failed request, and logs a warning at most once a minute for each kind and reason.
    #[cold]
    pub fn record_failure(&self, request: &dyn fmt::Debug, kind: FailureKind, error: Error) {
        let name = &self.name;
        if let Some(suppressed) = self.failures.count(kind, error) {
            tracing::warn!(?request, "{name}: {kind}: {error}{suppressed}");
        } else {
            tracing::debug!(?request, "{name}: {kind}: {error}");
        }
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Disk({:?})", self.name)
    }
}
