//! The trims and zeroes of large ranges that a connection has under way.

use std::collections::VecDeque;

use freestone_core::device::{Op, Request};

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
    pub ready: VecDeque<Sweep>,
    /// Those of which the device has a part, with what is left behind that.
    pub with_device: Vec<Sweep>,
    /// The client has gone.
    pub ended: bool,
}

/// A trim or write zeroes under way.
#[derive(Debug, Clone, Copy)]
pub struct Sweep {
    /// Its operation.
    pub slot: usize,
    /// What is not yet done, nor with the device.
    pub rest: Request,
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
    pub fn take_back(&mut self, slot: usize) -> Option<Sweep> {
        let at = self.with_device.iter().position(|sweep| sweep.slot == slot)?;
        Some(self.with_device.swap_remove(at))
    }
}

/// Whether a request is one to be done step by step. A zone is written as a whole.
pub fn is_sweep(request: &Request, has_zones: bool) -> bool {
    matches!(request.op, Op::Discard | Op::WriteZeroes) && request.len > STEP_BYTES && !has_zones
}

/// What the device is given of a sweep.
pub fn step(rest: &Request) -> Request {
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
