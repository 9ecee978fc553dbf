//! Maps: what lies where on a device, in equal parts of it.
//!
//! A map is drawn by a thread of its own, one at a time for all who ask, in turns with rests between
//! them ([`walk`]); it ends when its client leaves. One that a device holds up beyond its time is
//! left alone, and others are drawn beside it.

mod cells;
mod draw;
mod extents;
mod pages;
mod walk;
mod zones;

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use self::draw::Map;
use self::walk::{DRAW_MAX, Walk};
use super::api::{Parameters, Why};
use super::device::find;
use crate::http::Client;
use crate::service::Service;

/// Parts of a map.
const CELLS_MAX: u64 = 4096;
/// And where nothing was said.
const CELLS: u64 = 1024;
/// How long a device may answer nothing after the time of its map.
const GRACE: Duration = Duration::from_secs(2);
/// How often it is looked whether the client is still there.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Maps that devices hold up, and no more are drawn.
const HELD_UP_MAX: usize = 4;

/// The maps of a server.
pub struct Maps {
    service: Weak<Service>,
    at_work: Arc<Mutex<Vec<Work>>>,
}

/// A map that is being drawn.
struct Work {
    name: String,
    began: Instant,
}

/// Its place, which ends with its thread.
struct Place(Arc<Mutex<Vec<Work>>>, Instant);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|work| work.began != self.1);
    }
}

impl Maps {
    /// Of a server.
    pub fn new(service: &Arc<Service>) -> Self {
        Self { service: Arc::downgrade(service), at_work: Arc::default() }
    }

    /// The map of the device of that name.
    ///
    /// # Errors
    /// There is no such device, the parameters cannot be meant, another map is being drawn, or the
    /// device does not answer.
    pub fn map(&self, name: &str, mut parameters: Parameters<'_>, client: &Client<'_>) -> Result<Map, Why> {
        let cells = parameters.number("cells", (1, CELLS_MAX), CELLS)?;
        parameters.end()?;
        let uuid = {
            let service = self.service.upgrade().ok_or_else(|| Why::Busy("the server ends".into()))?;
            find(&service, name)?.identity.uuid
        };
        let place = self.begin(name)?;
        let began = place.1;
        let mut walk = Walk::new(Weak::clone(&self.service), name, uuid);
        let cancel = walk.cancel();
        let (tell, told) = mpsc::channel();
        let thread = thread::Builder::new().name("map".into()).spawn(move || {
            let drawn = draw::draw(&mut walk, cells);
            drop(place);
            // Nobody may wait for it any more.
            let _ = tell.send(drawn);
        });
        thread.map_err(|error| Why::Failed(format!("{name}: no thread for the map: {error}")))?;
        loop {
            match told.recv_timeout(LOOK_EVERY) {
                Ok(drawn) => return drawn,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Why::Failed(format!("{name}: the map cannot be drawn")));
                }
                Err(RecvTimeoutError::Timeout) if client.is_gone() => {
                    cancel.cancel();
                    return Err(Why::Busy(format!("{name}: nobody waits for the map")));
                }
                Err(RecvTimeoutError::Timeout) if began.elapsed() > DRAW_MAX + GRACE => {
                    cancel.cancel();
                    let why = "does not say what lies where: something holds up a request of it";
                    return Err(Why::Failed(format!("{name}: {why}")));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// The turn of a map; nobody waits for it, as who asks asks again.
    fn begin(&self, name: &str) -> Result<Place, Why> {
        let mut at_work = self.at_work.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let is_at_work = |work: &&Work| work.name == name || now - work.began < DRAW_MAX + GRACE;
        if let Some(work) = at_work.iter().find(is_at_work) {
            return Err(Why::Busy(format!("{name}: a map of {} is being drawn; ask again", work.name)));
        }
        if at_work.len() == HELD_UP_MAX {
            let why = format!("{HELD_UP_MAX} maps of other devices are held up");
            return Err(Why::Busy(format!("{name}: {why}; ask again")));
        }
        // They begin at different times, as no two of them begin together.
        at_work.push(Work { name: name.to_owned(), began: now });
        Ok(Place(Arc::clone(&self.at_work), now))
    }
}
