//! Completes requests: sends their results to the kernel through the queue's ring.

use freestone_core::device::{Error, IoBuf};

use super::Queue;
use crate::format::task::{CompletedRequest, Kind, Task, result_of};
use crate::kernel::abi::SECTOR_BYTES;
use crate::queue::slots::TagState;

impl Queue {
    /// Completes the requests that the device has finished.
    pub(super) fn complete_finished(&mut self) {
        if self.in_flight == 0 {
            return;
        }
        let mut finished = std::mem::take(&mut self.finished);
        self.resources.answers.take(&mut finished);
        for CompletedRequest { task, outcome, buffer } in finished.drain(..) {
            self.in_flight -= 1;
            self.charged -= task.charge;
            let slot = self.slots.get(task.tag);
            if slot.state != TagState::Device || slot.serial != task.serial {
                // The queue has already failed this request, for which the device took too long.
                continue;
            }
            match outcome.and_then(|at| self.take_data(&task, buffer).map(|()| at)) {
                Ok(at) => self.succeed(&task, at),
                Err(error) => self.fail(&task, error),
            }
        }
        self.finished = finished;
    }

    /// Stores the buffer that the device returned in the slot of the tag. Fails if a read has no
    /// valid data.
    fn take_data(&mut self, task: &Task, buffer: IoBuf) -> Result<(), Error> {
        if task.len == 0 {
            return Ok(());
        }
        let is_read = task.is_read();
        // A device that returns a different buffer has not filled it with data for the kernel.
        let fits = buffer.len() == task.len - task.done;
        if task.done == 0 {
            let fits = fits && buffer.capacity() >= self.slots.bytes();
            self.slots.put(task.tag, buffer);
            return if fits || !is_read { Ok(()) } else { Err(Error::Media) };
        }
        if is_read {
            if !fits {
                return Err(Error::Media);
            }
            let mut whole = self.slots.take(task.tag, task.len);
            whole[task.done..].copy_from_slice(&buffer);
            self.slots.put(task.tag, whole);
        }
        Ok(())
    }

    /// Completes a successful request. `at` is the byte offset to which an append wrote; other
    /// requests ignore it.
    pub(super) fn succeed(&mut self, task: &Task, at: u64) {
        let tag = task.tag;
        if !self.resources.user_copy {
            return self.commit(tag, task.result());
        }
        if task.is_read() {
            match self.slots.address(tag) {
                Ok(from) => self.copies.send(&mut *self.ring, tag, from, task.len),
                Err(error) => return self.fail(task, error),
            }
        }
        let place = if matches!(task.kind, Kind::Append(_)) { at / SECTOR_BYTES } else { 0 };
        self.ring.commit(tag, task.result(), place);
        self.slots.get(tag).state = TagState::Kernel;
    }

    /// Counts a failure and completes the request with its error.
    #[cold]
    pub(super) fn fail(&mut self, task: &Task, error: Error) {
        self.disk.record_failure(&task.kind, task.failed(), error);
        self.commit(task.tag, result_of(error));
    }

    /// Completes a request that is not valid for the device, without counting a failure.
    #[cold]
    pub(super) fn refuse(&mut self, tag: u16, op: u8, error: Error) {
        tracing::debug!(op, "{}: ublk: refused: {error}", self.disk.name);
        self.commit(tag, result_of(error));
    }

    /// Queues a completion and the fetch of the tag's next request. The kernel then owns the tag
    /// and its buffer.
    pub(super) fn commit(&mut self, tag: u16, result: i32) {
        let buffer = if self.resources.user_copy { Ok(0) } else { self.slots.address(tag) };
        if let Ok(buffer) = buffer {
            self.ring.commit(tag, result, buffer);
            self.slots.get(tag).state = TagState::Kernel;
        } else {
            // Only successful reads return data, and those have a buffer.
            self.starved.push((tag, result));
            self.slots.get(tag).state = TagState::Starved;
        }
    }

    /// Retries completions that failed because no memory was left for a buffer.
    pub(super) fn retry_starved(&mut self) {
        for (tag, result) in std::mem::take(&mut self.starved) {
            self.commit(tag, result);
        }
    }
}
