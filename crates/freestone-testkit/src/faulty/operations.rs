//! Effect of an operation on the disk's bytes and counts, and the checks of the disk's user.

use std::ops::Range;

use freestone_core::device::{Error, Geometry, Op, Request, Result};

use super::{Fault, FaultEffect, FaultSchedule, FaultyState};

/// Maximum number of stored violations; one is enough to fail a test.
const MAX_VIOLATIONS: usize = 16;

impl FaultyState {
    /// Numbers an operation that arrives, and returns the fault that applies to it, if any.
    pub(super) fn arrive(&mut self, request: &Request, geometry: &Geometry) -> Result<Option<FaultEffect>> {
        if let Err(error) = request.check(geometry) {
            self.record_violation(format!("{request:?} is refused: {error}"));
            return Err(error);
        }
        let all = self.counts.total();
        let count = self.counts.of(request.op);
        let of_kind = *count;
        *count += 1;
        self.counts.largest = self.counts.largest.max(request.len);
        self.counts.in_flight += 1;
        self.counts.in_flight_max = self.counts.in_flight_max.max(self.counts.in_flight);
        let range = request.offset..request.offset + request.len;
        if request.op == Op::Write {
            let other = self.writing.iter().find(|other| other.start < range.end && range.start < other.end);
            if let Some(other) = other.cloned() {
                self.record_violation(format!("{request:?} while {other:?} is being written"));
            }
            self.writing.push(range);
        } else if request.op == Op::Read && self.strict_reads {
            let blocks = blocks(&range, geometry);
            if let Some(block) = blocks.clone().find(|&block| !self.written[block]) {
                self.record_violation(format!("{request:?} reads block {block}, which was never written"));
            }
        }
        let matches_fault = |fault: &&Fault| {
            let number = match fault.op {
                Some(op) if op == request.op => of_kind,
                Some(_) => return false,
                None => all,
            };
            match fault.schedule {
                FaultSchedule::Always => true,
                FaultSchedule::At(n) => n == number,
                FaultSchedule::From(n) => n <= number,
            }
        };
        Ok(self.faults.iter().find(matches_fault).map(|fault| fault.effect))
    }

    /// Performs an operation and counts it as completed. `data` is the buffer of a read or write.
    pub(super) fn perform(
        &mut self,
        request: &Request,
        data: &mut Option<&mut [u8]>,
        fault: Option<FaultEffect>,
        geometry: &Geometry,
    ) -> Result<()> {
        self.counts.in_flight -= 1;
        let range = request.offset..request.offset + request.len;
        if request.op == Op::Write
            && let Some(at) = self.writing.iter().position(|other| *other == range)
        {
            self.writing.swap_remove(at);
        }
        match fault {
            Some(FaultEffect::Fail(error)) => return Err(error),
            Some(FaultEffect::Tear) if request.op != Op::Write => return Err(Error::Media),
            _ => {}
        }
        if self.truncated_at.is_some_and(|at| range.end > at) {
            return Err(Error::Media);
        }
        let at = range.start as usize..range.end as usize;
        match (request.op, data) {
            (Op::Write, Some(data)) => {
                let written = self.counts.bytes_written + request.len;
                if self.no_space_from.is_some_and(|from| range.end > from)
                    || self.no_space_after.is_some_and(|most| written > most)
                {
                    return Err(Error::NoSpace);
                }
                let block = geometry.logical_block as usize;
                let torn = fault == Some(FaultEffect::Tear);
                let len = if torn { data.len() / 2 / block * block } else { data.len() };
                self.bytes[at.start..at.start + len].copy_from_slice(&data[..len]);
                self.counts.bytes_written += len as u64;
                self.written[blocks(&(range.start..range.start + len as u64), geometry)].fill(true);
                if torn {
                    return Err(Error::Media);
                }
            }
            (Op::Read, Some(data)) => {
                data.copy_from_slice(&self.bytes[at]);
                self.counts.bytes_read += request.len;
                if fault == Some(FaultEffect::Corrupt) {
                    for block in data.chunks_mut(geometry.logical_block as usize) {
                        // Damage the middle of the block: in a header, a checksum might detect the damage.
                        let middle = block.len() / 2;
                        block[middle] ^= 0x55;
                    }
                }
            }
            (Op::Discard | Op::WriteZeroes, _) => {
                self.bytes[at].fill(0);
                self.written[blocks(&range, geometry)].fill(request.op == Op::WriteZeroes);
            }
            (Op::Flush, _) => {}
            (Op::Read | Op::Write, None) => return Err(Error::Misaligned),
        }
        if let Some(FaultEffect::FailDone(error)) = fault { Err(error) } else { Ok(()) }
    }

    fn record_violation(&mut self, violation: String) {
        if self.violations.len() < MAX_VIOLATIONS {
            self.violations.push(violation);
        }
    }
}

fn blocks(range: &Range<u64>, geometry: &Geometry) -> Range<usize> {
    let block = u64::from(geometry.logical_block);
    (range.start / block) as usize..(range.end / block) as usize
}
