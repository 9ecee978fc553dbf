//! What a queue's thread works with, and what is left of it when its ring is gone.

use std::sync::Arc;

use freestone_core::answers::Answers;
use freestone_core::budget::{Granted, Share};
use freestone_core::bytes::Bytes;
use freestone_core::workers::Workers;
use rustix::event::{PollFd, PollFlags, poll};

use crate::shared::Shared;
use crate::task::Finished;

/// What a queue's thread works with.
pub struct Parts {
    /// Which queue.
    pub index: u16,
    /// Requests that it may have.
    pub depth: u16,
    /// Largest request in bytes.
    pub max_bytes: usize,
    /// It copies data itself, as for zones.
    pub user_copy: bool,
    /// What it has to obey.
    pub shared: Arc<Shared>,
    /// How its thread is woken.
    pub answers: Arc<Answers<Finished>>,
    /// Of the process's bytes.
    pub share: Share,
    /// For dear requests.
    pub workers: Workers,
}

/// What a share of the budget tells when it was granted.
pub fn granted(answers: &Arc<Answers<Finished>>) -> Arc<dyn Granted> {
    Arc::clone(answers) as Arc<dyn Granted>
}

/// A queue that has no tags any more, while the device has requests of it.
pub struct Drained {
    parts: Parts,
    /// Nothing is cut off that was begun.
    _device: Bytes,
    in_flight: usize,
}

impl Drained {
    /// Of one that has let go of its ring.
    pub fn new(parts: Parts, device: Bytes, in_flight: usize) -> Self {
        Self { parts, _device: device, in_flight }
    }

    /// Waits for what the device has.
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
            // A signal may end the wait early: it looks again.
            let _ = poll(&mut [PollFd::new(answers.wake_fd(), PollFlags::IN)], None);
            answers.rearm();
        }
    }
}
