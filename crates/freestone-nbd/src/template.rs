//! Templates: exports that create a device for each connection.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use freestone_core::client_log;
use freestone_core::device::{Device, Geometry};

/// A device that was created for one connection.
pub struct Fresh {
    /// The device. The server holds it until the connection has ended.
    pub device: Arc<dyn Device>,
    /// Called exactly once, on the connection's thread, after the server has released the device. This
    /// happens however the connection ends: the client leaves or breaks the protocol, the device panics, the
    /// time to live is over, the template is unpublished by force, or the server stops. The device may still
    /// hold requests of a connection that was cut. The connection counts until the call returns, so it must
    /// not wait for the server.
    pub on_end: Box<dyn FnOnce() + Send>,
}

/// Creates a device for a connection, on the connection's thread and without a lock of the server. Several
/// calls may run in parallel. The error is a sentence for the client.
pub type Make = Arc<dyn Fn() -> Result<Fresh, String> + Send + Sync>;

/// Properties of a device that clients can query before they choose it.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    pub geometry: Geometry,
    /// True if the device has [`Changes`](freestone_core::device::Changes).
    pub changes: bool,
}

impl Facts {
    pub fn of(device: &dyn Device) -> Self {
        Self { geometry: device.geometry(), changes: device.changes().is_some() }
    }
}

/// The template of an export. `facts` is locked only to read or replace the value.
pub struct Template {
    make: Make,
    /// See [`TemplateOptions::ttl`](crate::TemplateOptions::ttl).
    pub ttl: Option<Duration>,
    /// Properties of the device created last, for clients that only query the export.
    facts: Mutex<Option<Facts>>,
}

impl Template {
    /// Creates a template without creating a device.
    pub fn new(make: Make, ttl: Option<Duration>) -> Self {
        Self { make, ttl, facts: Mutex::new(None) }
    }

    /// Creates a device for a connection. Also returns the call for the connection's end.
    pub fn open(&self) -> Result<(Arc<dyn Device>, OnEnd), String> {
        let fresh = (self.make)()?;
        let on_end = OnEnd(Some(fresh.on_end));
        let device = fresh.device;
        let facts = Facts::of(&*device);
        *self.facts.lock().unwrap_or_else(PoisonError::into_inner) = Some(facts);
        Ok((device, on_end))
    }

    /// Returns the properties of the device created last. If there was none, creates a device and ends it at
    /// once.
    pub fn facts(&self) -> Result<Facts, String> {
        let known = *self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(facts) = known {
            return Ok(facts);
        }
        let (device, mut on_end) = self.open()?;
        let facts = Facts::of(&*device);
        drop(device);
        on_end.run();
        Ok(facts)
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template").field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

/// Calls [`Fresh::on_end`] exactly once: in [`run`](Self::run), or else when it is dropped.
#[derive(Default)]
pub struct OnEnd(Option<Box<dyn FnOnce() + Send>>);

impl OnEnd {
    /// Calls the function unless there is none or it was called. Returns true if it panicked.
    pub fn run(&mut self) -> bool {
        let Some(call) = self.0.take() else { return false };
        let panicked = catch_unwind(AssertUnwindSafe(call)).is_err();
        if panicked {
            client_log!(error, "the end callback of a template device panicked");
        }
        panicked
    }
}

impl Drop for OnEnd {
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
            OnEnd(Some(Box::new(move || {
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
        // Also while its thread unwinds.
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let _end = end(true);
            panic!("injected");
        }));
        assert!(outcome.is_err());
        assert_eq!(count.load(SeqCst), 5);
    }
}
