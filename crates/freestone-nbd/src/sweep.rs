//! Trims and zeroes of ranges so large that the requests behind them are served meanwhile.
//!
//! Each turn of the connection does a step of one of them: what the device does of it at once, or a
//! part of bounded size that the device is given. When the client has gone, no further step is
//! begun.

use std::collections::VecDeque;

use freestone_core::device::{Buffer, IoBuf, Op, Request, Tried};

use crate::errno::{Action, Errno, Failure};
use crate::headers::Tag;
use crate::session::{Lost, Session};

/// A trim or write zeroes of more bytes is a sweep. What the device is given of one to do in its own
/// time is at most so much.
pub const STEP_BYTES: u64 = 256 << 20;
/// Sweeps of one connection at a time; the next one waits, and what comes behind it.
pub const MAX_SWEEPS: usize = 4;
/// Parts that the device is given end at multiples of this many bytes: no block is larger.
const STEP_ALIGN_BYTES: u64 = 4096;

const _: () = assert!(STEP_BYTES > STEP_ALIGN_BYTES);

/// The sweeps of one connection.
#[derive(Debug, Default)]
pub struct Sweeps {
    /// Those whose next step can be taken.
    ready: VecDeque<Sweep>,
    /// Those of which the device has a part, with what is left behind that.
    with_device: Vec<Sweep>,
    /// The client has gone.
    ended: bool,
}

/// A trim or write zeroes under way.
#[derive(Debug, Clone, Copy)]
struct Sweep {
    /// Its operation.
    slot: usize,
    rest: Request,
}

impl Sweeps {
    /// Whether a step can be taken.
    #[inline]
    pub fn are_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.with_device.is_empty()
    }

    /// Whether one more would be too many.
    pub fn are_many(&self) -> bool {
        self.ready.len() + self.with_device.len() >= MAX_SWEEPS
    }

    /// Whether the operation at `slot` is a sweep, of which the device gives a part back.
    fn take_back(&mut self, slot: usize) -> Option<Sweep> {
        let at = self.with_device.iter().position(|sweep| sweep.slot == slot)?;
        Some(self.with_device.swap_remove(at))
    }
}

/// Whether a request is one to be done step by step. A zone is written as a whole.
pub fn is_sweep(request: &Request, has_zones: bool) -> bool {
    matches!(request.op, Op::Discard | Op::WriteZeroes) && request.len > STEP_BYTES && !has_zones
}

impl Session<'_> {
    /// Begins a sweep; there are not [many](Sweeps::are_many).
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

/// Said to who sends no more, but may still read.
const GONE: Failure = Failure::new(Errno::Shutdown, "the connection ended before all of it was done");

/// What the device is given of a sweep.
fn step(rest: &Request) -> Request {
    if rest.len <= STEP_BYTES {
        return *rest;
    }
    // No overflow: the sweep, which is longer, lies inside the device.
    let end = (rest.offset + STEP_BYTES) & !(STEP_ALIGN_BYTES - 1);
    Request { len: end - rest.offset, ..*rest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_end_at_blocks_and_cover_all() {
        let whole = Request::new(Op::Discard, 777, 3 * STEP_BYTES);
        assert!(is_sweep(&whole, false) && !is_sweep(&whole, true));
        assert!(!is_sweep(&Request::new(Op::Discard, 0, STEP_BYTES), false));
        assert!(!is_sweep(&Request::write(0, 3 * STEP_BYTES), false));
        let (mut rest, mut ends) = (whole, Vec::new());
        while rest.len > 0 {
            let step = step(&rest);
            assert!(step.len > 0 && step.len <= STEP_BYTES && step.offset == rest.offset);
            rest = rest.rest(step.len);
            ends.push(rest.offset);
        }
        assert_eq!(ends, [STEP_BYTES, 2 * STEP_BYTES, 3 * STEP_BYTES, 3 * STEP_BYTES + 777]);
        let last = Request::new(Op::Discard, u64::MAX - 2 * STEP_BYTES, 2 * STEP_BYTES);
        assert!(step(&last).len > STEP_BYTES - STEP_ALIGN_BYTES);
    }
}
