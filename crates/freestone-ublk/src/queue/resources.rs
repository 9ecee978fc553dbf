//! The resources of a queue's thread, and the wait for the device after the queue's ring is closed.

use std::sync::Arc;

use freestone_core::budget::Share;
use freestone_core::bytes::Bytes;
use freestone_core::completion_queue::CompletionQueue;
use freestone_core::workers::Workers;

use crate::format::task::CompletedRequest;
use crate::shared::Shared;

/// Resources of a queue's thread.
pub struct QueueResources {
    pub index: u16,
    pub depth: u16,
    /// Largest request in bytes.
    pub max_bytes: usize,
    /// True if the server copies data itself; set for zoned devices.
    pub user_copy: bool,
    /// State shared with the device thread and the export.
    pub shared: Arc<Shared>,
    /// Receives the device's completions and wakes the queue's thread.
    pub answers: Arc<CompletionQueue<CompletedRequest>>,
    /// The queue's share of the memory budget.
    pub share: Share,
    /// Threads that run expensive requests.
    pub workers: Workers,
}

/// A queue whose ring is closed, and whose device may still have requests in flight.
pub struct DrainingQueue {
    resources: QueueResources,
    /// Keeps the device open until its requests are done.
    _device: Bytes,
    in_flight: usize,
}

impl DrainingQueue {
    /// Creates the object from the parts of a queue that has closed its ring.
    pub fn new(resources: QueueResources, device: Bytes, in_flight: usize) -> Self {
        Self { resources, _device: device, in_flight }
    }

    /// Waits until the device has completed all requests in flight.
    pub fn drain(mut self) {
        self.resources.share.release_all();
        let answers = &self.resources.answers;
        let mut finished = Vec::new();
        loop {
            answers.take(&mut finished);
            self.in_flight -= finished.len().min(self.in_flight);
            finished.clear();
            if self.in_flight == 0 {
                return;
            }
            answers.wait();
        }
    }
}
