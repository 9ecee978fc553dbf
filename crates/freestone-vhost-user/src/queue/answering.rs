//! The way back: what is done, shown to the driver.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use freestone_core::device::{Error, IoBuf};

use super::Queue;
use crate::ring::Broken;
use crate::task::{Finished, Kind, Task, status_of, zone_status_of};

impl Queue {
    /// Answers what the device has finished.
    pub(super) fn harvest(&mut self) {
        if self.in_flight == 0 {
            return;
        }
        let mut finished = std::mem::take(&mut self.finished);
        self.parts.answers.take(&mut finished);
        for Finished { task, segments, outcome, buffer } in finished.drain(..) {
            self.in_flight -= 1;
            self.charged -= task.charge;
            match outcome.and_then(|at| task.finish(&self.memory, &segments, &buffer, at)) {
                Ok((status, len)) => self.answer(&task, status, len),
                Err(error) => self.fail(&task, error),
            }
            self.keep(buffer);
            // Its room is the next chain's.
            if self.chain.segments.capacity() == 0 {
                self.chain.segments = segments;
            }
        }
        self.finished = finished;
    }

    /// A request is done by this thread, whose segments are those of the chain at hand; for `at` and
    /// the buffer see [`Task::finish`].
    #[inline]
    pub(super) fn succeed(&mut self, task: &Task, buffer: IoBuf, at: u64) {
        let outcome = task.finish(&self.memory, &self.chain.segments, &buffer, at);
        self.keep(buffer);
        match outcome {
            Ok((status, len)) => self.answer(task, status, len),
            Err(error) => self.fail(task, error),
        }
    }

    /// Counts what failed for who looks after the device, and answers.
    #[cold]
    pub(super) fn fail(&mut self, task: &Task, error: Error) {
        self.parts.disk.failed(&task.kind, task.failed(), error);
        let status = match task.kind {
            Kind::Append(_) | Kind::Zone(_) => zone_status_of(error),
            _ => status_of(error),
        };
        self.answer(task, status, 0);
    }

    /// Gives the chain back with a status, behind `len` bytes of data.
    #[inline]
    pub(super) fn answer(&mut self, task: &Task, status: u8, len: usize) {
        if self.memory.set(task.status, status).is_err() {
            self.broken = Some(Broken::Memory);
        }
        self.parts.ring.give(task.head, len as u32 + 1);
        if let Some(notes) = &mut self.parts.notes {
            notes.answer(task.head);
        }
    }

    /// Shows the driver what was given back, and tells it where it wants that.
    pub(super) fn publish(&mut self) {
        if self.parts.ring.unpublished() == 0 || self.parts.guest.silent.load(Ordering::SeqCst) {
            return;
        }
        if let Some(notes) = &self.parts.notes {
            notes.before_publish();
        }
        let tell = self.parts.ring.publish();
        if let Some(notes) = &mut self.parts.notes {
            notes.published(self.parts.ring.used_index());
        }
        if tell && let Some(call) = &*self.parts.call.lock().unwrap_or_else(PoisonError::into_inner) {
            freestone_core::eventfd::wake(call);
        }
    }
}
