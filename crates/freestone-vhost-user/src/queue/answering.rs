//! The way back: what is done, shown to the driver.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use freestone_core::device::{Error, IoBuf};

use super::Queue;
use crate::ring::Broken;
use crate::task::{Finished, Kind, Task, scatter, status_of, zone_status_of};
use crate::wire::{SECTOR_BYTES, status};

impl Queue {
    /// Answers what the device has finished.
    pub(super) fn harvest(&mut self) {
        if self.in_flight == 0 {
            return;
        }
        let mut finished = std::mem::take(&mut self.finished);
        self.parts.answers.take(&mut finished);
        for Finished { task, outcome, buffer } in finished.drain(..) {
            self.in_flight -= 1;
            self.charged -= task.charge;
            match outcome {
                Ok(at) => self.succeed(task, buffer, at),
                Err(error) => self.fail(task, error),
            }
        }
        self.finished = finished;
    }

    /// A request is done; a read's data from [`Task::done`] on is in the buffer, and an append's went
    /// to byte `at`.
    pub(super) fn succeed(&mut self, task: Task, buffer: IoBuf, at: u64) {
        if !task.is_read() {
            self.keep(buffer);
            if !matches!(task.kind, Kind::Append(_)) {
                return self.answer(task, status::OK, 0);
            }
            let sector = (at / SECTOR_BYTES).to_le_bytes();
            return match scatter(&self.memory, &task.data, 0, &sector) {
                Ok(()) => self.answer(task, status::OK, sector.len()),
                Err(_) => self.answer(task, status::IOERR, 0),
            };
        }
        // A device that hands back another buffer has no data for the driver.
        if task.done + buffer.len() != task.len {
            return self.fail(task, Error::Media);
        }
        let written = scatter(&self.memory, &task.data, task.done, &buffer);
        self.keep(buffer);
        let len = task.len;
        match written {
            Ok(()) => self.answer(task, status::OK, len),
            Err(_) => self.answer(task, status::IOERR, 0),
        }
    }

    /// Counts what failed for who looks after the device, and answers.
    #[cold]
    pub(super) fn fail(&mut self, task: Task, error: Error) {
        let (disk, failed) = (&self.parts.disk, task.failed());
        if let Some(held_back) = disk.failures.count(failed, error) {
            tracing::warn!(kind = ?task.kind, "{}: {failed}: {error}{held_back}", disk.name);
        } else {
            tracing::debug!(kind = ?task.kind, "{}: {failed}: {error}", disk.name);
        }
        let status = match task.kind {
            Kind::Append(_) | Kind::Zone(_) => zone_status_of(error),
            _ => status_of(error),
        };
        self.answer(task, status, 0);
    }

    /// Gives the chain back with a status, behind `len` bytes of data.
    pub(super) fn answer(&mut self, task: Task, status: u8, len: usize) {
        if self.memory.write(task.status, &[status]).is_err() {
            self.broken = Some(Broken::Memory);
        }
        self.parts.ring.give(task.head, len as u32 + 1);
        if let Some(notes) = &mut self.parts.notes {
            notes.answer(task.head);
        }
        // Its room is the next chain's.
        if self.chain.segments.capacity() == 0 {
            self.chain.segments = task.data.into_room();
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
            // It does not block; where the counter is full, the driver has not looked at the last.
            let _ = rustix::io::write(call, &1_u64.to_ne_bytes());
        }
    }
}
