//! Maps of devices for the web page: kinds of content, counted in equal parts (cells) of the device.
//!
//! A thread of its own draws each map, with pauses ([`walk`]), and stops when the client disconnects. Only
//! one map is drawn at a time. A map stalls if a call of the device does not return until the deadline. A
//! stalled map does not block maps of other devices, but at most [`STALLED_MAX`] stalled maps may exist.

mod cells;
mod draw;
mod extents;
mod pages;
mod walk;
mod zones;

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use freestone_control::http::Client;
use freestone_core::sync::Mutex;

use self::draw::Map;
use self::walk::{DRAW_MAX, Walk};
use super::api::{ApiError, Parameters};
use super::device::find;
use crate::service::Service;

/// Maximum number of cells of a map.
const CELLS_MAX: u64 = 4096;
/// Number of cells of a map if the request does not contain `cells`.
const CELLS: u64 = 1024;
/// Time after [`DRAW_MAX`] until a map is treated as stalled: a call of the device has not returned.
const GRACE: Duration = Duration::from_secs(2);
/// Interval at which the server checks whether the client is still connected.
const CHECK_EVERY: Duration = Duration::from_millis(50);
/// Maximum number of stalled maps. While this many exist, no further map is drawn.
const STALLED_MAX: usize = 4;

/// The maps of a server that are being drawn.
pub struct Maps {
    service: Weak<Service>,
    drawings: Arc<Mutex<Vec<Drawing>>>,
}

/// A map that is being drawn.
struct Drawing {
    name: String,
    began: Instant,
}

/// Registration of a map in [`Maps::drawings`], identified by its time of begin. Dropped when the thread of
/// the map ends.
struct DrawingSlot(Arc<Mutex<Vec<Drawing>>>, Instant);

impl Drop for DrawingSlot {
    fn drop(&mut self) {
        self.0.lock().retain(|drawing| drawing.began != self.1);
    }
}

impl Maps {
    /// Creates the set of maps for the devices of `service`; it is empty at first.
    pub fn new(service: &Arc<Service>) -> Self {
        Self { service: Arc::downgrade(service), drawings: Arc::default() }
    }

    /// Draws the map of the device with this name, and waits for the result.
    ///
    /// # Errors
    /// The device does not exist, a parameter is invalid, another map is being drawn, the client has
    /// disconnected, or the device does not respond in time.
    pub fn map(
        &self,
        name: &str,
        mut parameters: Parameters<'_>,
        client: &Client<'_>,
    ) -> Result<Map, ApiError> {
        let cells = parameters.number("cells", (1, CELLS_MAX), CELLS)?;
        parameters.end()?;
        let uuid = {
            let service =
                self.service.upgrade().ok_or_else(|| ApiError::Busy("the server is shutting down".into()))?;
            find(&service, name)?.identity.uuid
        };
        let slot = self.begin(name)?;
        let began = slot.1;
        let mut walk = Walk::new(Weak::clone(&self.service), name, uuid);
        let cancel = walk.cancel();
        let (sender, receiver) = mpsc::channel();
        let thread = thread::Builder::new().name("map".into()).spawn(move || {
            let drawn = draw::draw(&mut walk, cells);
            drop(slot);
            // The receiver is gone if the client has disconnected.
            let _ = sender.send(drawn);
        });
        thread.map_err(|error| {
            ApiError::Failed(format!("{name}: cannot start a thread for the map: {error}"))
        })?;
        loop {
            match receiver.recv_timeout(CHECK_EVERY) {
                Ok(drawn) => return drawn,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(ApiError::Failed(format!("{name}: the map cannot be drawn")));
                }
                Err(RecvTimeoutError::Timeout) if client.has_disconnected() => {
                    cancel.cancel();
                    return Err(ApiError::Busy(format!("{name}: the client has disconnected")));
                }
                Err(RecvTimeoutError::Timeout) if began.elapsed() > DRAW_MAX + GRACE => {
                    cancel.cancel();
                    let why = "the map cannot be drawn: a call of the device does not return";
                    return Err(ApiError::Failed(format!("{name}: {why}")));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Registers a new map. If another map is being drawn, this fails instead of waiting, because the page
    /// retries.
    fn begin(&self, name: &str) -> Result<DrawingSlot, ApiError> {
        let mut drawings = self.drawings.lock();
        let now = Instant::now();
        let blocks = |drawing: &&Drawing| drawing.name == name || now - drawing.began < DRAW_MAX + GRACE;
        if let Some(drawing) = drawings.iter().find(blocks) {
            let why = format!("a map of {} is being drawn; try again", drawing.name);
            return Err(ApiError::Busy(format!("{name}: {why}")));
        }
        if drawings.len() == STALLED_MAX {
            let why = format!("{STALLED_MAX} maps wait for devices that do not respond");
            return Err(ApiError::Busy(format!("{name}: {why}; try again")));
        }
        // `began` identifies the drawing: a drawing begins only if all others began more than [`DRAW_MAX`] ago.
        drawings.push(Drawing { name: name.to_owned(), began: now });
        Ok(DrawingSlot(Arc::clone(&self.drawings), now))
    }
}
