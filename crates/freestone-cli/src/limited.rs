//! What one export lets through.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use freestone::device::Counting;
use freestone::places::Places;
use freestone_spec::limits::LimitSpec;

/// One export: what it lets through, on the ways into its device. Of a template each connection has a
/// way of its own, and so all the limits for itself.
#[derive(Default)]
pub struct Limited {
    /// Who is connected to it.
    pub places: Arc<Places>,
    /// Locked for a look or a change.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    limits: LimitSpec,
    ways: Vec<Weak<Counting>>,
}

impl Limited {
    /// One that lets through that.
    pub fn new(limits: LimitSpec) -> Self {
        let limited = Self::default();
        limited.places.set(limits.max_clients.into());
        limited.lock().limits = limits;
        limited
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here can be half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another way is limited as well.
    ///
    /// # Errors
    /// A thread could not be started.
    pub fn join(&self, way: &Arc<Counting>) -> io::Result<()> {
        let mut state = self.lock();
        way.set_limits(&state.limits.rates)?;
        state.ways.retain(|way| way.strong_count() > 0);
        state.ways.push(Arc::downgrade(way));
        Ok(())
    }

    /// What it lets through.
    pub fn limits(&self) -> LimitSpec {
        self.lock().limits
    }

    /// It lets through that from now on.
    ///
    /// # Errors
    /// A thread could not be started.
    pub fn set(&self, limits: LimitSpec) -> io::Result<()> {
        let mut state = self.lock();
        for way in state.ways.iter().filter_map(Weak::upgrade) {
            way.set_limits(&limits.rates)?;
        }
        self.places.set(limits.max_clients.into());
        state.limits = limits;
        Ok(())
    }

    /// The ways that there are.
    pub fn ways(&self) -> Vec<Arc<Counting>> {
        self.lock().ways.iter().filter_map(Weak::upgrade).collect()
    }
}
