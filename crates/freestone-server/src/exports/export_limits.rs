//! Limits of one export: number of clients, requests and bytes per second.

use std::io;
use std::sync::{Arc, Weak};

use freestone::concurrency_limit::ConcurrencyLimit;
use freestone::device::Counting;
use freestone_core::sync::Mutex;
use freestone_spec::limits::LimitSpec;

/// Limits of an export, applied to each of its access paths (counters between the clients and the device).
/// Each connection to a template has its own access path, and so its own limits.
#[derive(Default)]
pub struct ExportLimits {
    /// Limit on connected clients, with the number of clients connected now.
    pub places: Arc<ConcurrencyLimit>,
    /// The lock is held only while the state is read or changed.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    limits: LimitSpec,
    access_paths: Vec<Weak<Counting>>,
}

impl ExportLimits {
    /// Returns the given limits, not applied to any access path yet.
    pub fn new(limits: LimitSpec) -> Self {
        let limited = Self::default();
        limited.places.set(limits.max_clients.into());
        limited.state.lock().limits = limits;
        limited
    }

    /// Applies the limits to another access path of the export.
    ///
    /// # Errors
    /// Fails if the thread that delays limited requests cannot be started.
    pub fn join(&self, access_path: &Arc<Counting>) -> io::Result<()> {
        let mut state = self.state.lock();
        access_path.set_limits(&state.limits.rates)?;
        state.access_paths.retain(|access_path| access_path.strong_count() > 0);
        state.access_paths.push(Arc::downgrade(access_path));
        Ok(())
    }

    /// Returns the current limits.
    pub fn limits(&self) -> LimitSpec {
        self.state.lock().limits
    }

    /// Changes the limits, also for existing access paths.
    ///
    /// # Errors
    /// Fails if the thread that delays limited requests cannot be started.
    pub fn set(&self, limits: LimitSpec) -> io::Result<()> {
        let mut state = self.state.lock();
        for access_path in state.access_paths.iter().filter_map(Weak::upgrade) {
            access_path.set_limits(&limits.rates)?;
        }
        self.places.set(limits.max_clients.into());
        state.limits = limits;
        Ok(())
    }

    /// Returns the access paths that are still in use.
    pub fn access_paths(&self) -> Vec<Arc<Counting>> {
        self.state.lock().access_paths.iter().filter_map(Weak::upgrade).collect()
    }
}
