//! A device under a name, as who exports it has it.

use std::fmt;

use super::{Device, Error, Failed, Failures};
use crate::sync::Arc;

/// A device under a name.
pub struct Disk {
    /// Its name.
    pub name: String,
    /// The device.
    pub device: Arc<dyn Device>,
    /// By option or by the device.
    pub read_only: bool,
    /// Requests that failed.
    pub failures: Arc<Failures>,
}

impl Disk {
    /// `device` as `name`, read-only where the device or the caller says so.
    pub fn new(name: &str, read_only: bool, device: Arc<dyn Device>, failures: Arc<Failures>) -> Self {
        let read_only = read_only || device.geometry().read_only;
        Self { name: name.to_owned(), device, read_only, failures }
    }

    /// Counts a failed request for who looks after the device, and logs it, though seldom.
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
