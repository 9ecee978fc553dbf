//! State shared by an export's owner, its device thread and its queues.

use std::path::PathBuf;
use std::sync::Arc;

use freestone_core::completion_queue::CompletionQueue;
use freestone_core::exports::{ExportState, Life};

use crate::format::task::CompletedRequest;
use crate::kernel::BlockDevice;

/// The shared state of an export. The queues apply its disk, holds, cuts and `dead`.
pub type Shared = Life<State>;

/// The state of a block device.
#[derive(Default)]
pub struct State {
    /// Number of times that all requests were failed, as in a loss of power.
    pub cuts: u64,
    /// True once the grace period is over: all requests fail.
    pub dead: bool,
    /// True if the block device is served until the process ends, for the next one to recover.
    pub is_left: bool,
    /// True once the kernel has removed the device.
    pub removed: bool,
    pub id: Option<u32>,
    /// [`feature`](crate::kernel::abi::feature) bits that the driver granted.
    pub features: u64,
    pub block: Option<Arc<dyn BlockDevice>>,
    pub queues: Vec<QueueState>,
}

/// State of a queue, as visible to other threads.
pub struct QueueState {
    /// Wakes the queue's thread.
    pub answers: Arc<CompletionQueue<CompletedRequest>>,
    /// Last version of the shared state that the queue applied.
    pub applied_version: u64,
    /// Number of requests in flight in the device when the version was applied or last reported.
    pub in_flight: usize,
    /// True if the kernel has no more requests of the queue, and its ring is closed.
    pub closed: bool,
}

impl ExportState for State {
    fn wake_threads(&self) {
        for queue in &self.queues {
            queue.answers.wake();
        }
    }
}

impl State {
    pub fn path(&self) -> Option<PathBuf> {
        self.block.as_ref().map(|block| block.path())
    }

    /// Returns true if every queue has applied `version` or later and has no requests in flight.
    /// Closed queues count as idle.
    pub fn is_idle(&self, version: u64) -> bool {
        self.queues
            .iter()
            .all(|queue| queue.closed || (queue.applied_version >= version && queue.in_flight == 0))
    }
}
