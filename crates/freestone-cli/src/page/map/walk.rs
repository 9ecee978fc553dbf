//! How a device is walked over: in turns, with rests, not beyond its time, and not when nobody waits
//! any more. Between two turns nothing of the device is held, so that it can be removed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use freestone_spec::kinds::Entry;
use uuid::Uuid;

use super::super::api::Why;
use crate::service::Service;

/// How long a map is drawn; what was not looked at by then is not in it.
pub const DRAW_MAX: Duration = Duration::from_secs(10);
/// The longest rest at one time, so that a cancel is heard.
const REST_MAX: Duration = Duration::from_millis(20);

/// How fast is looked.
#[derive(Clone, Copy)]
pub struct Pace {
    /// Looks of a turn.
    pub looks: u32,
    /// Looks of a second, at most.
    pub looks_per_second: u32,
}

/// A walk over a device.
pub struct Walk {
    service: Weak<Service>,
    name: String,
    /// Another device may get the name.
    uuid: Uuid,
    began: Instant,
    looks: u64,
    cancelled: Arc<AtomicBool>,
}

/// Ends a walk.
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Nobody waits for it any more.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Walk {
    /// Over the device that has this name and identity.
    pub fn new(service: Weak<Service>, name: &str, uuid: Uuid) -> Self {
        let name = name.to_owned();
        Self { service, name, uuid, began: Instant::now(), looks: 0, cancelled: Arc::default() }
    }

    /// What ends it.
    pub fn cancel(&self) -> Cancel {
        Cancel(Arc::clone(&self.cancelled))
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How long it has taken.
    pub fn took(&self) -> Duration {
        self.began.elapsed()
    }

    /// The device.
    ///
    /// # Errors
    /// It is gone, or the server ends.
    pub fn entry(&self) -> Result<Arc<Entry>, Why> {
        let service = self.service.upgrade().ok_or_else(|| Why::Busy("the server ends".into()))?;
        let entry = service.registry.find(&self.name).filter(|entry| entry.identity.uuid == self.uuid);
        entry.ok_or_else(|| Why::NoDevice(format!("{}: was removed meanwhile", self.name)))
    }

    /// The device for another turn, after a rest where the pace asks for one; `None`: the time is over.
    ///
    /// # Errors
    /// As [`entry`](Self::entry), or nobody waits any more.
    pub fn turn(&mut self, pace: Pace) -> Result<Option<Arc<Entry>>, Why> {
        let due = Duration::from_secs(self.looks) / pace.looks_per_second;
        self.looks += u64::from(pace.looks);
        loop {
            if self.cancelled.load(Ordering::SeqCst) {
                return Err(Why::Busy(format!("{}: nobody waits for the map", self.name)));
            }
            let took = self.took();
            if took >= DRAW_MAX {
                return Ok(None);
            }
            if took >= due {
                return self.entry().map(Some);
            }
            thread::sleep(due.saturating_sub(took).min(REST_MAX));
        }
    }
}
