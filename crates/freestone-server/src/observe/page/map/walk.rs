//! Walk over a device to draw a map. The walk is divided into turns with pauses, and ends at a deadline or
//! when cancelled.
//!
//! No reference to the device is kept between two turns, so that the device can be removed meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use freestone_spec::kinds::Entry;
use uuid::Uuid;

use super::super::api::ApiError;
use crate::service::Service;

/// Maximum time for drawing a map. The map shows only the part of the device that was examined within this
/// time.
pub const DRAW_MAX: Duration = Duration::from_secs(10);
/// Maximum time between two checks for a cancellation during a pause.
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// Speed of a walk, in steps. Each kind of map defines what a step is.
#[derive(Clone, Copy)]
pub struct Pace {
    /// Number of steps of a turn.
    pub steps: u32,
    /// Maximum number of steps per second.
    pub steps_per_second: u32,
}

/// A walk over a device to draw its map.
pub struct Walk {
    service: Weak<Service>,
    name: String,
    /// UUID of the device, because a new device may get the name of a removed one.
    uuid: Uuid,
    began: Instant,
    steps: u64,
    cancelled: Arc<AtomicBool>,
}

/// Handle that cancels a walk, also from another thread.
pub struct CancelHandle(Arc<AtomicBool>);

impl CancelHandle {
    /// Makes the next turn of the walk fail.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Walk {
    /// Begins a walk over the device with this name and UUID.
    pub fn new(service: Weak<Service>, name: &str, uuid: Uuid) -> Self {
        let name = name.to_owned();
        Self { service, name, uuid, began: Instant::now(), steps: 0, cancelled: Arc::default() }
    }

    /// Returns a handle that cancels the walk.
    pub fn cancel(&self) -> CancelHandle {
        CancelHandle(Arc::clone(&self.cancelled))
    }

    /// Returns the name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the time since the start of the walk.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Returns the device that the walk examines.
    ///
    /// # Errors
    /// The device was removed, or the server is shutting down.
    pub fn entry(&self) -> Result<Arc<Entry>, ApiError> {
        let service =
            self.service.upgrade().ok_or_else(|| ApiError::Busy("the server is shutting down".into()))?;
        let entry = service.registry.find(&self.name).filter(|entry| entry.identity.uuid == self.uuid);
        entry.ok_or_else(|| ApiError::NoDevice(format!("{}: was removed meanwhile", self.name)))
    }

    /// Returns the device for the next turn, after a pause if the pace requires it. Returns None after the
    /// deadline, [`DRAW_MAX`].
    ///
    /// # Errors
    /// The device was removed, the server is shutting down, or the walk was cancelled.
    pub fn next_turn(&mut self, pace: Pace) -> Result<Option<Arc<Entry>>, ApiError> {
        let due = Duration::from_secs(self.steps) / pace.steps_per_second;
        self.steps += u64::from(pace.steps);
        loop {
            if self.cancelled.load(Ordering::SeqCst) {
                return Err(ApiError::Busy(format!("{}: the map was cancelled", self.name)));
            }
            let took = self.elapsed();
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
