//! Completes requests and publishes completions to the driver.

use std::sync::atomic::Ordering;

use freestone_core::device::{Error, IoBuf};

use super::Queue;
use crate::ring::RingError;
use crate::task::{CompletedRequest, Kind, Task, status_of, zone_status_of};

impl Queue {
    /// Completes the requests that the device has finished.
    pub(super) fn complete_finished(&mut self) {
        if self.in_flight == 0 {
            return;
        }
        let mut finished = std::mem::take(&mut self.finished);
        self.resources.answers.take(&mut finished);
        for CompletedRequest { task, segments, outcome, buffer } in finished.drain(..) {
            self.in_flight -= 1;
            self.charged -= task.charge;
            match outcome.and_then(|at| task.finish(&self.memory, &segments, &buffer, at)) {
                Ok((status, len)) => self.complete(&task, status, len),
                Err(error) => self.fail(&task, error),
            }
            self.keep_buffer(buffer);
            // Keeps the allocation for the next chain.
            if self.chain.segments.capacity() == 0 {
                self.chain.segments = segments;
            }
        }
        self.finished = finished;
    }

    /// Completes a request that this thread has executed. Its segments are those of the current
    /// chain. For `at` and `buffer` see [`Task::finish`].
    #[inline]
    pub(super) fn succeed(&mut self, task: &Task, buffer: IoBuf, at: u64) {
        let outcome = task.finish(&self.memory, &self.chain.segments, &buffer, at);
        self.keep_buffer(buffer);
        match outcome {
            Ok((status, len)) => self.complete(task, status, len),
            Err(error) => self.fail(task, error),
        }
    }

    /// Counts a failure and completes the request with its error.
    #[cold]
    pub(super) fn fail(&mut self, task: &Task, error: Error) {
        self.resources.disk.record_failure(&task.kind, task.failed(), error);
        let status = match task.kind {
            Kind::Append(_) | Kind::Zone(_) => zone_status_of(error),
            _ => status_of(error),
        };
        self.complete(task, status, 0);
    }

    /// Adds a chain to the used ring, with `len` bytes of data and the status byte.
    #[inline]
    pub(super) fn complete(&mut self, task: &Task, status: u8, len: usize) {
        if self.memory.set(task.status, status).is_err() {
            self.broken = Some(RingError::Memory);
        }
        self.resources.ring.push_used(task.head, len as u32 + 1);
        if let Some(queue_log) = &mut self.resources.queue_log {
            queue_log.complete(task.head);
        }
    }

    /// Publishes the completed chains, and notifies the driver if it requested that.
    pub(super) fn publish(&mut self) {
        if self.resources.ring.unpublished() == 0
            || self.resources.frontend.stopped_publishing.load(Ordering::SeqCst)
        {
            return;
        }
        if let Some(queue_log) = &self.resources.queue_log {
            queue_log.before_publish();
        }
        let must_notify = self.resources.ring.publish();
        if let Some(queue_log) = &mut self.resources.queue_log {
            queue_log.after_publish(self.resources.ring.used_index());
        }
        if must_notify && let Some(call) = &*self.resources.call.lock() {
            freestone_core::eventfd::wake(call);
        }
    }
}
