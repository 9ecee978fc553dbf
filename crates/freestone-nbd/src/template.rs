//! Exports that give every connection a device of its own.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use freestone_core::client_log;
use freestone_core::device::{Device, Geometry};

/// A device that was made for one connection.
pub struct Fresh {
    /// The device. The server holds it until the connection has ended.
    pub device: Arc<dyn Device>,
    /// Called exactly once, on the connection's thread, after the server has let go of the device:
    /// when the client has left, was killed or broke the protocol, when the device panicked, when
    /// the time to live is over, when the template is unpublished by force or the server stops. A
    /// device may then still hold requests of a connection that was cut. The connection counts
    /// until this returns, so it must not wait for the server.
    pub on_end: Box<dyn FnOnce() + Send>,
}

/// Makes a device for a connection, on that connection's thread and under no lock of the server;
/// several may be made at once. An error is a sentence for the client.
pub type Make = Arc<dyn Fn() -> Result<Fresh, String> + Send + Sync>;

/// What clients are told of a device before they choose it.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    /// Its geometry.
    pub geometry: Geometry,
    /// Whether it has [`Changes`](freestone_core::device::Changes).
    pub changes: bool,
}

impl Facts {
    /// What is true of this device now.
    pub fn of(device: &dyn Device) -> Self {
        Self { geometry: device.geometry(), changes: device.changes().is_some() }
    }
}

/// What an export of a template holds. `facts` is locked to read or replace the value only.
pub struct Template {
    make: Make,
    /// See [`TemplateOptions::ttl`](crate::TemplateOptions::ttl).
    pub ttl: Option<Duration>,
    /// Of the device that was made last: what is told of the next one to who only asks.
    facts: Mutex<Option<Facts>>,
}

impl Template {
    /// A template of which no device was made yet.
    pub fn new(make: Make, ttl: Option<Duration>) -> Self {
        Self { make, ttl, facts: Mutex::new(None) }
    }

    /// A device for a connection, and what is to be called when that has ended.
    pub fn open(&self) -> Result<(Arc<dyn Device>, OnEnd), String> {
        let fresh = (self.make)()?;
        let on_end = OnEnd(Some(fresh.on_end));
        let device = fresh.device;
        let facts = Facts::of(&*device);
        *self.facts.lock().unwrap_or_else(PoisonError::into_inner) = Some(facts);
        Ok((device, on_end))
    }

    /// What the last device was like. Where there was none, one is made and ended at once.
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

/// [`Fresh::on_end`], called once: by [`run`](Self::run), else when it is dropped.
#[derive(Default)]
pub struct OnEnd(Option<Box<dyn FnOnce() + Send>>);

impl OnEnd {
    /// Calls it, unless there is none or it was called. True: it panicked.
    pub fn run(&mut self) -> bool {
        let Some(call) = self.0.take() else { return false };
        let panicked = catch_unwind(AssertUnwindSafe(call)).is_err();
        if panicked {
            client_log!(error, "the end of a template's device panicked");
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
    fn the_end_comes_once_and_a_panic_in_it_stays_there() {
        let count = Arc::new(AtomicUsize::new(0));
        let end = |panics: bool| {
            let count = Arc::clone(&count);
            OnEnd(Some(Box::new(move || {
                count.fetch_add(1, SeqCst);
                assert!(!panics, "asked to");
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
            panic!("asked to");
        }));
        assert!(outcome.is_err());
        assert_eq!(count.load(SeqCst), 5);
    }
}
