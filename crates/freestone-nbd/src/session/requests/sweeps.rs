//! The sweeps of a connection: trims and write zeroes of large ranges in progress.

use std::collections::VecDeque;

use freestone_core::device::{Op, Request};

/// A trim or write zeroes of more than this number of bytes is a sweep. Also the largest part of a sweep
/// submitted to the device at once.
pub const SWEEP_STEP_BYTES: u64 = 256 << 20;
/// Maximum number of sweeps of one connection. The next sweep waits, and so do the requests behind it.
pub const MAX_SWEEPS: usize = 4;
/// Alignment in bytes of the ends of submitted parts. No device has larger blocks.
const STEP_ALIGN_BYTES: u64 = 4096;

const _: () = assert!(SWEEP_STEP_BYTES > STEP_ALIGN_BYTES);

#[derive(Debug, Default)]
pub struct Sweeps {
    /// Sweeps that are ready for their next step.
    pub ready: VecDeque<Sweep>,
    /// Sweeps that wait for a part submitted to the device, with the range behind that part.
    pub submitted: Vec<Sweep>,
    /// Set when the client has gone.
    pub ended: bool,
}

/// A trim or write zeroes in progress.
#[derive(Debug, Clone, Copy)]
pub struct Sweep {
    pub slot: usize,
    /// The part of the range that is neither done nor submitted.
    pub rest: Request,
}

impl Sweeps {
    #[inline]
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    pub fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.submitted.is_empty()
    }

    /// Returns true if no further sweep may start.
    pub fn is_full(&self) -> bool {
        self.ready.len() + self.submitted.len() >= MAX_SWEEPS
    }

    /// Removes and returns the sweep of `slot` that waits for the device. Returns None if the operation is
    /// not a sweep.
    pub fn take_submitted(&mut self, slot: usize) -> Option<Sweep> {
        let at = self.submitted.iter().position(|sweep| sweep.slot == slot)?;
        Some(self.submitted.swap_remove(at))
    }
}

/// Returns true if a request is executed step by step, as a sweep. Zoned devices execute each request as a
/// whole.
pub fn is_sweep(request: &Request, has_zones: bool) -> bool {
    matches!(request.op, Op::Discard | Op::WriteZeroes) && request.len > SWEEP_STEP_BYTES && !has_zones
}

/// Returns the next part of a sweep to submit to the device.
pub fn step(rest: &Request) -> Request {
    if rest.len <= SWEEP_STEP_BYTES {
        return *rest;
    }
    // Cannot overflow: `rest` is longer than a step and ends inside the device.
    let end = (rest.offset + SWEEP_STEP_BYTES) & !(STEP_ALIGN_BYTES - 1);
    Request { len: end - rest.offset, ..*rest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sweep_steps_are_aligned_and_cover_range() {
        let whole = Request::new(Op::Discard, 777, 3 * SWEEP_STEP_BYTES);
        assert!(is_sweep(&whole, false) && !is_sweep(&whole, true));
        assert!(!is_sweep(&Request::new(Op::Discard, 0, SWEEP_STEP_BYTES), false));
        assert!(!is_sweep(&Request::write(0, 3 * SWEEP_STEP_BYTES), false));
        let (mut rest, mut ends) = (whole, Vec::new());
        while rest.len > 0 {
            let step = step(&rest);
            assert!(step.len > 0 && step.len <= SWEEP_STEP_BYTES && step.offset == rest.offset);
            rest = rest.rest(step.len);
            ends.push(rest.offset);
        }
        assert_eq!(
            ends,
            [SWEEP_STEP_BYTES, 2 * SWEEP_STEP_BYTES, 3 * SWEEP_STEP_BYTES, 3 * SWEEP_STEP_BYTES + 777]
        );
        let last = Request::new(Op::Discard, u64::MAX - 2 * SWEEP_STEP_BYTES, 2 * SWEEP_STEP_BYTES);
        assert!(step(&last).len > SWEEP_STEP_BYTES - STEP_ALIGN_BYTES);
    }
}
