//! Walk over a device for a map: in turns with pauses, until a deadline or a cancellation.
//!
//! Nothing refers to the device between two turns, so it can be removed meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use freestone_spec::kinds::Entry;
use uuid::Uuid;

use super::super::api::ApiError;
use crate::service::Service;

/// Deadline of a map. The map shows only what was examined until then.
pub const DRAW_MAX: Duration = Duration::from_secs(10);
/// Longest single pause, so that a cancellation takes effect soon.
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// Speed of a walk. Each kind of map defines what a step is.
#[derive(Clone, Copy)]
pub struct Pace {
    /// Steps of a turn.
    pub steps: u32,
    /// Largest number of steps per second.
    pub steps_per_second: u32,
}

/// A walk over a device.
pub struct Walk {
    service: Weak<Service>,
    name: String,
    /// Identity of the device, because a new device may get its name.
    uuid: Uuid,
    began: Instant,
    steps: u64,
    cancelled: Arc<AtomicBool>,
}

/// Cancels a walk.
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Makes the next turn of the walk fail.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Walk {
    /// Begins a walk over the device of this name and UUID.
    pub fn new(service: Weak<Service>, name: &str, uuid: Uuid) -> Self {
        let name = name.to_owned();
        Self { service, name, uuid, began: Instant::now(), steps: 0, cancelled: Arc::default() }
    }

    /// Returns a handle that cancels the walk.
    pub fn cancel(&self) -> Cancel {
        Cancel(Arc::clone(&self.cancelled))
    }

    /// Returns the name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the time since the walk began.
    pub fn took(&self) -> Duration {
        self.began.elapsed()
    }

    /// Returns the device.
    ///
    /// # Errors
    /// The device was removed, or the server is shutting down.
    pub fn entry(&self) -> Result<Arc<Entry>, ApiError> {
        let service =
            self.service.upgrade().ok_or_else(|| ApiError::Busy("the server is shutting down".into()))?;
        let entry = service.registry.find(&self.name).filter(|entry| entry.identity.uuid == self.uuid);
        entry.ok_or_else(|| ApiError::NoDevice(format!("{}: was removed meanwhile", self.name)))
    }

    /// Returns the device for the next turn, after a pause if the pace needs one. Returns None after the
    /// deadline.
    ///
    /// # Errors
    /// As [`entry`](Self::entry), or the walk was cancelled.
    pub fn turn(&mut self, pace: Pace) -> Result<Option<Arc<Entry>>, ApiError> {
        let due = Duration::from_secs(self.steps) / pace.steps_per_second;
        self.steps += u64::from(pace.steps);
        loop {
            if self.cancelled.load(Ordering::SeqCst) {
                return Err(ApiError::Busy(format!("{}: the map was cancelled", self.name)));
            }
            let took = self.took();
            if took >= DRAW_MAX {
                return Ok(None);
            }
            if took >= due {
                return self.entry().map(Some);
            }
            thread::sleep(due.saturating_sub(took).min(PAUSE_MAX));
        }
    }
}
