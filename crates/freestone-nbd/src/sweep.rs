//! Trims and zeroes of ranges so large that the requests behind them are served meanwhile.
//!
//! Each turn of the connection does a step of one of them: what the device does of it at once, or a
//! part of bounded size that the device is given. When the client has gone, no further step is
//! begun.

use freestone_core::device::{Buffer, IoBuf, Request, Tried};

use crate::errno::{Action, Errno, Failure};
use crate::headers::Tag;
use crate::session::{Lost, Session};
use crate::sweeps::{Sweep, step};

/// Said to who sends no more, but may still read.
const GONE: Failure = Failure::new(Errno::Shutdown, "the connection ended before all of it was done");

impl Session<'_> {
    /// Begins a sweep; there are not [many](crate::sweeps::Sweeps::are_many).
    pub(crate) fn begin_sweep(&mut self, tag: Tag, request: Request, action: Action) {
        let slot = self.operations.open(tag, action, false);
        self.sweeps.ready.push_back(Sweep { slot, rest: request });
    }

    /// Takes a step of one sweep.
    #[inline(never)]
    pub(crate) fn sweep(&mut self) -> Result<(), Lost> {
        let Some(Sweep { slot, rest }) = self.sweeps.ready.pop_front() else { return Ok(()) };
        if self.link.queue().is_ended() {
            return Err(Lost);
        }
        if self.sweeps.ended || self.has_gone() {
            self.sweeps.ended = true;
            return self.swept(slot, rest);
        }
        match self.device.try_io(&rest, Buffer::None) {
            Ok(Tried::Done) => self.swept(slot, rest.rest(rest.len)),
            Ok(Tried::Partly(bytes)) => self.swept(slot, rest.rest(bytes)),
            Ok(Tried::WouldBlock) => {
                let step = step(&rest);
                self.sweeps.with_device.push(Sweep { slot, rest: rest.rest(step.len) });
                self.submit(slot, step, IoBuf::empty(), false);
                Ok(())
            }
            Err(error) => {
                let operation = self.operations.get(slot);
                operation.failure = Some(Failure::of(error, operation.action, &rest));
                self.end_sweep(slot)
            }
        }
    }

    /// The device gave a part of the operation at `slot` back: of a sweep the next step can be
    /// taken. False: it is none.
    pub(crate) fn sweep_on(&mut self, slot: usize) -> Result<bool, Lost> {
        let Some(sweep) = self.sweeps.take_back(slot) else { return Ok(false) };
        self.swept(slot, sweep.rest)?;
        Ok(true)
    }

    /// All of a sweep but `rest` is done, or it has failed.
    fn swept(&mut self, slot: usize, rest: Request) -> Result<(), Lost> {
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

    fn end_sweep(&mut self, slot: usize) -> Result<(), Lost> {
        self.operations.get(slot).open = false;
        self.finish(slot)
    }

    /// The client has gone: no further step is begun.
    #[cold]
    pub(crate) fn end_sweeps(&mut self) -> Result<(), Lost> {
        self.sweeps.ended = true;
        while let Some(Sweep { slot, rest }) = self.sweeps.ready.pop_front() {
            self.swept(slot, rest)?;
        }
        Ok(())
    }
}
