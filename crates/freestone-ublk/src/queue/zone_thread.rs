//! A thread for zone operations, which may block. Each queue has its own, which ends with the
//! queue.

use std::io;
use std::sync::Arc;

use freestone_core::work_queue::WorkQueue;

/// A work queue whose thread starts on first use. Dropping this stops the thread after the queued
/// work is done.
pub struct ZoneThread(Arc<WorkQueue>);

impl ZoneThread {
    /// Returns the work queue, and starts its thread if necessary.
    ///
    /// # Errors
    /// Fails if the thread cannot be created.
    pub fn work_queue(&self) -> io::Result<Arc<WorkQueue>> {
        self.0.start()?;
        Ok(Arc::clone(&self.0))
    }
}

impl Default for ZoneThread {
    fn default() -> Self {
        Self(WorkQueue::new("ublk-zones"))
    }
}

impl Drop for ZoneThread {
    fn drop(&mut self) {
        self.0.stop();
    }
}
