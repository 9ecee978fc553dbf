//! A named device, as exports see it.

use std::fmt;

use super::{Device, Error, Failed, Failures};
use crate::sync::Arc;

/// A named device.
pub struct Disk {
    /// Name of the device.
    pub name: String,
    /// The device itself.
    pub device: Arc<dyn Device>,
    /// Set by an option, or because the device is read-only.
    pub read_only: bool,
    /// Counters of failed requests.
    pub failures: Arc<Failures>,
}

impl Disk {
    /// Creates a disk. The disk is read-only if the caller or the device says so.
    pub fn new(name: &str, read_only: bool, device: Arc<dyn Device>, failures: Arc<Failures>) -> Self {
        let read_only = read_only || device.geometry().read_only;
        Self { name: name.to_owned(), device, read_only, failures }
    }

    /// Counts a failed request, and logs it at most once a minute for each kind.
    #[cold]
    pub fn failed(&self, request: &dyn fmt::Debug, failed: Failed, error: Error) {
        let name = &self.name;
        if let Some(held_back) = self.failures.count(failed, error) {
            tracing::warn!(?request, "{name}: {failed}: {error}{held_back}");
        } else {
            tracing::debug!(?request, "{name}: {failed}: {error}");
        }
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Disk({:?})", self.name)
    }
}
