//! Parts of requests in flight: their submission, their share of the memory budget, and their completions.

use std::sync::Arc;

use freestone_core::device::{Completion, Error, IoBuf, Request};
use freestone_core::plug::Plug;

use super::{ConnectionLost, Session};
use crate::limits::{MAX_IN_FLIGHT, MAX_IN_FLIGHT_BYTES};
use crate::link::CompletedPart;
use crate::wire::errno::{CommandGroup, Failure};

impl Session<'_> {
    /// Converts the device's completions into replies.
    pub(super) fn handle_completions(&mut self) -> Result<(), ConnectionLost> {
        if self.operations.in_flight == 0 {
            return Ok(());
        }
        let mut finished = std::mem::take(&mut self.finished);
        self.link.queue().take(&mut finished);
        let mut result = Ok(());
        for part in finished.drain(..) {
            self.account(&part);
            if result.is_ok() {
                result = self.answer_part(part);
            }
        }
        self.finished = finished;
        result
    }

    pub(super) fn discard_finished(&mut self) {
        let mut finished = std::mem::take(&mut self.finished);
        self.link.queue().take(&mut finished);
        for part in finished.drain(..) {
            self.account(&part);
        }
        self.finished = finished;
    }

    fn account(&mut self, part: &CompletedPart) {
        self.operations.in_flight -= 1;
        self.operations.charged -= part.charge;
        self.operations.get(part.slot).parts -= 1;
    }

    fn answer_part(&mut self, part: CompletedPart) -> Result<(), ConnectionLost> {
        freestone_core::trail::arrive!();
        let operation = self.operations.get(part.slot);
        let group = operation.group;
        if operation.window {
            let whole = part.buffer.len() == part.len;
            let outcome = part.outcome.and(if whole { Ok(part.buffer) } else { Err(Error::Media) });
            self.window = Some(outcome.map_err(|error| Failure::of(error, group, &part.request)));
            self.operations.take_ended(part.slot);
            return Ok(());
        }
        match part.outcome {
            Err(error) => {
                operation.failure.get_or_insert_with(|| Failure::of(error, group, &part.request));
            }
            Ok(()) if operation.is_read && part.buffer.len() != part.len => {
                // The device returned a buffer of another length, so there is no data for the client.
                operation.failure.get_or_insert_with(|| Failure::of(Error::Media, group, &part.request));
            }
            Ok(()) if operation.is_read => {
                let done = !operation.open && operation.parts == 0 && operation.failure.is_none();
                let tag = operation.tag;
                self.reply_data(tag, part.request.offset, part.buffer, done)?;
                if done {
                    self.operations.take_ended(part.slot);
                    return Ok(());
                }
            }
            Ok(()) => self.replies.buffers.put_back(part.buffer),
        }
        if self.resume_sweep(part.slot)? {
            return Ok(());
        }
        self.finish(part.slot)
    }
}

/// Submission of request parts, and their share of the memory budget.
impl Session<'_> {
    /// Returns true if another part with a buffer of `bytes` may be in flight. If the server's memory budget
    /// has no room, the connection starts to wait for room in it.
    pub(super) fn try_admit(&mut self, bytes: usize) -> bool {
        let charged = self.operations.charged + self.replies.owned_bytes();
        if self.operations.in_flight >= MAX_IN_FLIGHT
            || (charged > 0 && charged + bytes > MAX_IN_FLIGHT_BYTES)
        {
            return false;
        }
        if self.share.try_reserve((self.held_bytes() + bytes) as u64) {
            return true;
        }
        // The current request needs the budget more than spare buffers do.
        self.replies.buffers.clear();
        self.share.wait_for(charged as u64, bytes as u64);
        false
    }

    fn held_bytes(&self) -> usize {
        self.operations.charged + self.replies.owned_bytes() + self.replies.buffers.bytes()
    }

    /// Stops waiting for the server's memory budget.
    pub(super) fn stop_waiting(&mut self) {
        let held = self.held_bytes() as u64;
        self.share.stop_waiting(held);
    }

    /// Returns unused bytes to the server's memory budget.
    pub(super) fn return_budget(&mut self) {
        match self.held_bytes() {
            0 => self.share.release_all(),
            held => self.share.shrink_to(held as u64),
        }
    }

    /// Submits a part of the operation at `slot` to the device. Charges the buffer, unless `charged` is true,
    /// which means it was charged before.
    pub(super) fn submit(&mut self, slot: usize, request: Request, buffer: IoBuf, charged: bool) {
        freestone_core::trail::step!();
        let done = self.begin_part(slot, request, &buffer, charged);
        self.replies.plug.get_or_insert_with(Plug::start);
        self.device.submit(request, buffer, done);
    }

    /// Accounts for a part before it is passed to the device or a worker. Returns the completion, which adds
    /// the result to the connection's queue.
    pub(super) fn begin_part(
        &mut self,
        slot: usize,
        request: Request,
        buffer: &IoBuf,
        charged: bool,
    ) -> Completion {
        let len = buffer.len();
        let beside = self.device.extra_bytes(&request);
        let charge = len + beside;
        self.operations.charged += if charged { beside } else { charge };
        self.operations.in_flight += 1;
        self.operations.get(slot).parts += 1;
        self.tally.submitted += 1;
        let queue = Arc::clone(self.link.queue());
        Completion::new(move |outcome, buffer| {
            queue.push(CompletedPart { slot, request, len, charge, outcome, buffer });
        })
    }
}

pub fn memory_failure(group: CommandGroup, request: &Request) -> Failure {
    Failure::of(Error::NoMemory, group, request)
}
