//! Executes sweeps: trims and write zeroes of ranges so large that later requests are served meanwhile.
//!
//! Each turn of the connection advances one sweep by one step: the device completes a part inline, or a part
//! of limited size is submitted. When the client has gone, no further step starts.

use freestone_core::device::{Buffer, IoBuf, Request, TryResult};

use super::sweeps::{Sweep, step};
use crate::session::{ConnectionLost, Session};
use crate::wire::errno::{CommandGroup, Errno, Failure};
use crate::wire::headers::Tag;

/// Error reply for a sweep that was stopped because the client sends no more. The client may still read.
const GONE: Failure = Failure::new(Errno::Shutdown, "the connection ended before the request was complete");

impl Session<'_> {
    /// Starts a sweep. The caller has checked [`Sweeps::is_full`](super::sweeps::Sweeps::is_full).
    pub(in crate::session) fn begin_sweep(&mut self, tag: Tag, request: Request, group: CommandGroup) {
        let slot = self.operations.open(tag, group, false);
        self.sweeps.ready.push_back(Sweep { slot, rest: request });
    }

    #[inline(never)]
    pub(in crate::session) fn sweep(&mut self) -> Result<(), ConnectionLost> {
        let Some(Sweep { slot, rest }) = self.sweeps.ready.pop_front() else { return Ok(()) };
        if self.link.queue().is_shut_down() {
            return Err(ConnectionLost);
        }
        if self.sweeps.ended || self.has_client_gone() {
            self.sweeps.ended = true;
            return self.advance_sweep(slot, rest);
        }
        match self.device.try_io(&rest, Buffer::None) {
            Ok(TryResult::Done) => self.advance_sweep(slot, rest.rest(rest.len)),
            Ok(TryResult::Partly(bytes)) => self.advance_sweep(slot, rest.rest(bytes)),
            Ok(TryResult::WouldBlock) => {
                let step = step(&rest);
                self.sweeps.submitted.push(Sweep { slot, rest: rest.rest(step.len) });
                self.submit(slot, step, IoBuf::empty(), false);
                Ok(())
            }
            Err(error) => {
                let operation = self.operations.get(slot);
                operation.failure = Some(Failure::of(error, operation.group, &rest));
                self.end_sweep(slot)
            }
        }
    }

    /// Advances the sweep of `slot` after the device completed a part. Returns false if the operation is not
    /// a sweep.
    pub(in crate::session) fn resume_sweep(&mut self, slot: usize) -> Result<bool, ConnectionLost> {
        let Some(sweep) = self.sweeps.take_submitted(slot) else { return Ok(false) };
        self.advance_sweep(slot, sweep.rest)?;
        Ok(true)
    }

    /// Records that all of a sweep but `rest` is done or has failed. Ends the sweep or queues its next step.
    fn advance_sweep(&mut self, slot: usize, rest: Request) -> Result<(), ConnectionLost> {
        let ended = self.sweeps.ended;
        let operation = self.operations.get(slot);
        if rest.len > 0 && ended {
            operation.failure.get_or_insert(GONE);
        }
        if rest.len == 0 || operation.failure.is_some() {
            return self.end_sweep(slot);
        }
        self.sweeps.ready.push_back(Sweep { slot, rest });
        Ok(())
    }

    fn end_sweep(&mut self, slot: usize) -> Result<(), ConnectionLost> {
        self.operations.get(slot).open = false;
        self.finish(slot)
    }

    /// Stops all sweeps because the client has gone. No further step starts.
    #[cold]
    pub(in crate::session) fn stop_sweeps(&mut self) -> Result<(), ConnectionLost> {
        self.sweeps.ended = true;
        while let Some(Sweep { slot, rest }) = self.sweeps.ready.pop_front() {
            self.advance_sweep(slot, rest)?;
        }
        Ok(())
    }
}
