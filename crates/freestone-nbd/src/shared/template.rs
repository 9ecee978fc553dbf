//! Templates: exports that create a device for each connection.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use freestone_core::client_log;
use freestone_core::device::{Device, Geometry};
use freestone_core::sync::Mutex;

/// A device that was created for one connection.
pub struct ConnectionDevice {
    /// The device. The server holds it until the connection has ended.
    pub device: Arc<dyn Device>,
    /// Called exactly once, on the connection's thread, after the server has released the device. This
    /// happens however the connection ends: the client leaves or violates the protocol, the device panics,
    /// the time to live is over, the template is unpublished by force, or the server stops. The device may
    /// still hold requests of a connection that was cut. The server counts the connection until the call
    /// returns, so the call must not wait for the server.
    pub on_end: Box<dyn FnOnce() + Send>,
}

/// Creates a device for a connection, on the connection's thread and without a lock of the server. Several
/// calls may run in parallel. The error is a message for the client.
pub type DeviceFactory = Arc<dyn Fn() -> Result<ConnectionDevice, String> + Send + Sync>;

/// Properties of a device that clients can query before they choose its export.
#[derive(Debug, Clone, Copy)]
pub struct DeviceInfo {
    pub geometry: Geometry,
    /// True if the device has [`Changes`](freestone_core::device::Changes).
    pub changes: bool,
}

impl DeviceInfo {
    pub fn of(device: &dyn Device) -> Self {
        Self { geometry: device.geometry(), changes: device.changes().is_some() }
    }
}

/// The template of an export. `device_info` is locked only to read or replace the value.
pub struct Template {
    make: DeviceFactory,
    /// See [`TemplateOptions::ttl`](crate::TemplateOptions::ttl).
    pub ttl: Option<Duration>,
    /// Properties of the device created last, for clients that only query the export. `None` before the first
    /// device.
    device_info: Mutex<Option<DeviceInfo>>,
}

impl Template {
    /// Creates a template without creating a device.
    pub fn new(make: DeviceFactory, ttl: Option<Duration>) -> Self {
        Self { make, ttl, device_info: Mutex::new(None) }
    }

    /// Creates a device for a connection. Also returns the callback for the end of the connection.
    pub fn open(&self) -> Result<(Arc<dyn Device>, EndCallback), String> {
        let fresh = (self.make)()?;
        let on_end = EndCallback(Some(fresh.on_end));
        let device = fresh.device;
        let device_info = DeviceInfo::of(&*device);
        *self.device_info.lock() = Some(device_info);
        Ok((device, on_end))
    }

    /// Returns the properties of the device created last. If none was created yet, creates a device and ends
    /// it at once.
    pub fn device_info(&self) -> Result<DeviceInfo, String> {
        let known = *self.device_info.lock();
        if let Some(device_info) = known {
            return Ok(device_info);
        }
        let (device, mut on_end) = self.open()?;
        let device_info = DeviceInfo::of(&*device);
        drop(device);
        on_end.run();
        Ok(device_info)
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template").field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

/// Calls [`ConnectionDevice::on_end`] exactly once: in [`run`](Self::run), or else when it is dropped.
#[derive(Default)]
pub struct EndCallback(Option<Box<dyn FnOnce() + Send>>);

impl EndCallback {
    /// Calls the callback, unless there is none or it was called before. Returns true if it panicked.
    pub fn run(&mut self) -> bool {
        let Some(call) = self.0.take() else { return false };
        let panicked = catch_unwind(AssertUnwindSafe(call)).is_err();
        if panicked {
            client_log!(error, "the end callback of a template device panicked");
        }
        panicked
    }
}

impl Drop for EndCallback {
    fn drop(&mut self) {
        self.run();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    #[test]
    fn on_end_runs_once_and_catches_panic() {
        let count = Arc::new(AtomicUsize::new(0));
        let end = |panics: bool| {
            let count = Arc::clone(&count);
            EndCallback(Some(Box::new(move || {
                count.fetch_add(1, SeqCst);
                assert!(!panics, "injected");
            })))
        };
        let mut once = end(false);
        assert!(!once.run());
        assert!(!once.run());
        drop(once);
        assert_eq!(count.load(SeqCst), 1);
        drop(end(false));
        drop(end(true));
        assert_eq!(count.load(SeqCst), 3);
        assert!(end(true).run());
        // The callback also runs while its thread unwinds.
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let _end = end(true);
            panic!("injected");
        }));
        assert!(outcome.is_err());
        assert_eq!(count.load(SeqCst), 5);
    }
}
