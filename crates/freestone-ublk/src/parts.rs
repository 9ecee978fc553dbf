//! The resources of a queue's thread, and the wait for the device after the queue's ring is closed.

use std::sync::Arc;

use freestone_core::answers::Answers;
use freestone_core::budget::{Granted, Share};
use freestone_core::bytes::Bytes;
use freestone_core::workers::Workers;
use rustix::event::{PollFd, PollFlags, poll};

use crate::shared::Shared;
use crate::task::Finished;

/// Resources of a queue's thread.
pub struct Parts {
    pub index: u16,
    pub depth: u16,
    /// Largest request in bytes.
    pub max_bytes: usize,
    /// The server copies data itself; set for zoned devices.
    pub user_copy: bool,
    /// State shared with the keeper and the export.
    pub shared: Arc<Shared>,
    /// Receives completions of the device and wakes the thread.
    pub answers: Arc<Answers<Finished>>,
    /// The queue's share of the in-flight limit.
    pub share: Share,
    /// Threads that run expensive requests.
    pub workers: Workers,
}

/// Returns the callback that a budget share calls when bytes are granted.
pub fn grant_callback(answers: &Arc<Answers<Finished>>) -> Arc<dyn Granted> {
    Arc::clone(answers) as Arc<dyn Granted>
}

/// A queue without tags whose device still has requests in flight.
pub struct Drained {
    parts: Parts,
    /// Keeps the device open until its requests are done.
    _device: Bytes,
    in_flight: usize,
}

impl Drained {
    /// Takes over from a queue that has closed its ring.
    pub fn new(parts: Parts, device: Bytes, in_flight: usize) -> Self {
        Self { parts, _device: device, in_flight }
    }

    /// Waits until the device has completed all requests.
    pub fn drain(mut self) {
        self.parts.share.leave();
        let answers = &self.parts.answers;
        let mut finished = Vec::new();
        loop {
            answers.take(&mut finished);
            self.in_flight -= finished.len().min(self.in_flight);
            finished.clear();
            if self.in_flight == 0 {
                return;
            }
            // A signal may end the wait early; the loop checks again.
            let _ = poll(&mut [PollFd::new(answers.wake_fd(), PollFlags::IN)], None);
            answers.rearm();
        }
    }
}
