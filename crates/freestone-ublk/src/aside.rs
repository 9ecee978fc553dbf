//! A thread for what may take long, as long as its owner lives.

use std::io;
use std::sync::Arc;

use freestone_core::work_queue::WorkQueue;

/// The thread, once there is work for it. What was begun is done also without the owner.
pub struct Aside(Arc<WorkQueue>);

impl Aside {
    /// The one to push work to.
    ///
    /// # Errors
    /// There can be no thread.
    pub fn thread(&self) -> io::Result<Arc<WorkQueue>> {
        self.0.start()?;
        Ok(Arc::clone(&self.0))
    }
}

impl Default for Aside {
    fn default() -> Self {
        Self(WorkQueue::new("ublk-zones"))
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        self.0.stop();
    }
}
