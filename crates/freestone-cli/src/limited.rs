//! Limits of one export: number of clients, requests and bytes per second.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use freestone::device::Counting;
use freestone::places::Places;
use freestone_spec::limits::LimitSpec;

/// Limits of an export, applied to each of its paths into the device. Each connection to a template has its
/// own path, and so its own limits.
#[derive(Default)]
pub struct Limited {
    /// Limit and count of connected clients.
    pub places: Arc<Places>,
    /// The lock is held only while the state is read or changed.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    limits: LimitSpec,
    ways: Vec<Weak<Counting>>,
}

impl Limited {
    /// Returns an export with these limits.
    pub fn new(limits: LimitSpec) -> Self {
        let limited = Self::default();
        limited.places.set(limits.max_clients.into());
        limited.lock().limits = limits;
        limited
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave the state inconsistent, so poisoning is ignored.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies the limits to another path into the device.
    ///
    /// # Errors
    /// The thread that limited requests need could not be started.
    pub fn join(&self, way: &Arc<Counting>) -> io::Result<()> {
        let mut state = self.lock();
        way.set_limits(&state.limits.rates)?;
        state.ways.retain(|way| way.strong_count() > 0);
        state.ways.push(Arc::downgrade(way));
        Ok(())
    }

    /// Returns the limits.
    pub fn limits(&self) -> LimitSpec {
        self.lock().limits
    }

    /// Changes the limits.
    ///
    /// # Errors
    /// The thread that limited requests need could not be started.
    pub fn set(&self, limits: LimitSpec) -> io::Result<()> {
        let mut state = self.lock();
        for way in state.ways.iter().filter_map(Weak::upgrade) {
            way.set_limits(&limits.rates)?;
        }
        self.places.set(limits.max_clients.into());
        state.limits = limits;
        Ok(())
    }

    /// Returns the paths into the device that are in use.
    pub fn ways(&self) -> Vec<Arc<Counting>> {
        self.lock().ways.iter().filter_map(Weak::upgrade).collect()
    }
}
