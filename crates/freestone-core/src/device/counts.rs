//! What a device was asked and what it answered, counted per CPU.

use super::{Op, Request, Result, Tried};
use crate::percpu::Counters;

const READS: usize = 0;
const WRITES: usize = 1;
const DISCARDS: usize = 2;
const ZEROES: usize = 3;
const FLUSHES: usize = 4;
const APPENDS: usize = 5;
const READ_BYTES: usize = 6;
const WRITTEN_BYTES: usize = 7;
const ERRORS: usize = 8;
const DISCARDED_BYTES: usize = 9;
const ZEROED_BYTES: usize = 10;
const IN_FLIGHT: usize = 11;
const COUNT: usize = 12;

/// Counters of a device's operations. Adding is one or two additions to the CPU's own cells.
#[derive(Default)]
pub struct OpCounts(Counters<COUNT>);

/// What [`OpCounts`] have counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counted {
    /// Reads that succeeded.
    pub reads: u64,
    /// Writes that succeeded, without appends.
    pub writes: u64,
    /// Discards that succeeded.
    pub discards: u64,
    /// Write zeroes that succeeded.
    pub zeroes: u64,
    /// Flushes that succeeded.
    pub flushes: u64,
    /// Zone appends that succeeded.
    pub appends: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes of data that were written or appended.
    pub written_bytes: u64,
    /// Operations that failed.
    pub errors: u64,
    /// Bytes that were discarded.
    pub discarded_bytes: u64,
    /// Bytes that were zeroed.
    pub zeroed_bytes: u64,
    /// Submitted requests that are not answered, where they were [told](OpCounts::begun).
    pub in_flight: u64,
}

impl OpCounts {
    /// Counts what one try came to: its bytes where it made progress, the operation when it ended.
    /// What would block counts when it is submitted.
    #[inline]
    pub fn tried(&self, request: &Request, outcome: &Result<Tried>) {
        match outcome {
            Ok(Tried::Done) => self.done(request.op, request.len),
            Ok(Tried::Partly(bytes)) => self.bytes(request.op, *bytes),
            Ok(Tried::WouldBlock) => {}
            Err(_) => self.error(),
        }
    }

    /// Counts how a submitted request was answered.
    #[inline]
    pub fn answered(&self, request: &Request, outcome: &Result<()>) {
        match outcome {
            Ok(()) => self.done(request.op, request.len),
            Err(_) => self.error(),
        }
    }

    /// Counts how an append of `bytes` bytes was answered.
    #[inline]
    pub fn appended<T>(&self, bytes: u64, outcome: &Result<T>) {
        match outcome {
            Ok(_) => self.0.add_both([(APPENDS, 1), (WRITTEN_BYTES, bytes as i64)]),
            Err(_) => self.error(),
        }
    }

    /// Counts an operation that succeeded, whose last `bytes` bytes were not counted yet.
    #[inline]
    pub fn done(&self, op: Op, bytes: u64) {
        match op {
            Op::Read => self.0.add_both([(READS, 1), (READ_BYTES, bytes as i64)]),
            Op::Write => self.0.add_both([(WRITES, 1), (WRITTEN_BYTES, bytes as i64)]),
            Op::Discard => self.0.add_both([(DISCARDS, 1), (DISCARDED_BYTES, bytes as i64)]),
            Op::WriteZeroes => self.0.add_both([(ZEROES, 1), (ZEROED_BYTES, bytes as i64)]),
            Op::Flush => self.0.add(FLUSHES, 1),
        }
    }

    /// A request is submitted: it is in flight until it has [`ended`](Self::ended).
    pub fn begun(&self) {
        self.0.add(IN_FLIGHT, 1);
    }

    /// A submitted request is answered.
    pub fn ended(&self) {
        self.0.add(IN_FLIGHT, -1);
    }

    /// Counts an operation that failed.
    #[cold]
    pub fn error(&self) {
        self.0.add(ERRORS, 1);
    }

    #[inline]
    fn bytes(&self, op: Op, bytes: u64) {
        match op {
            Op::Read => self.0.add(READ_BYTES, bytes as i64),
            Op::Write => self.0.add(WRITTEN_BYTES, bytes as i64),
            Op::Discard => self.0.add(DISCARDED_BYTES, bytes as i64),
            Op::WriteZeroes => self.0.add(ZEROED_BYTES, bytes as i64),
            Op::Flush => {}
        }
    }

    /// Every counter; exact when nothing is in flight.
    pub fn snapshot(&self) -> Counted {
        let get = |counter| self.0.get(counter);
        Counted {
            reads: get(READS),
            writes: get(WRITES),
            discards: get(DISCARDS),
            zeroes: get(ZEROES),
            flushes: get(FLUSHES),
            appends: get(APPENDS),
            read_bytes: get(READ_BYTES),
            written_bytes: get(WRITTEN_BYTES),
            errors: get(ERRORS),
            discarded_bytes: get(DISCARDED_BYTES),
            zeroed_bytes: get(ZEROED_BYTES),
            in_flight: get(IN_FLIGHT),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Error;

    #[test]
    fn a_request_counts_once_however_it_was_done() {
        let counts = OpCounts::default();
        let read = Request::read(0, 8192);
        counts.tried(&read, &Ok(Tried::Partly(4096)));
        counts.tried(&read.rest(4096), &Ok(Tried::WouldBlock));
        counts.answered(&read.rest(4096), &Ok(()));
        counts.tried(&Request::write(0, 512), &Ok(Tried::Done));
        counts.tried(&Request::write(0, 512), &Err(Error::Media));
        counts.answered(&Request::flush(), &Ok(()));
        counts.answered(&Request::flush(), &Err(Error::Gone));
        counts.tried(&Request::new(Op::Discard, 0, 1536), &Ok(Tried::Partly(1024)));
        counts.tried(&Request::new(Op::Discard, 1024, 512), &Ok(Tried::Done));
        counts.begun();
        counts.begun();
        counts.ended();
        counts.tried(&Request::new(Op::WriteZeroes, 0, 512), &Ok(Tried::Done));
        counts.appended(1024, &Ok(77));
        counts.appended(1024, &Err::<u64, _>(Error::ZoneCondition));
        let expected = Counted {
            reads: 1,
            writes: 1,
            discards: 1,
            zeroes: 1,
            flushes: 1,
            appends: 1,
            read_bytes: 8192,
            written_bytes: 512 + 1024,
            errors: 3,
            discarded_bytes: 512 + 1024,
            zeroed_bytes: 512,
            in_flight: 1,
        };
        assert_eq!(counts.snapshot(), expected);
    }

    #[test]
    fn threads_lose_no_count() {
        let counts = OpCounts::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| counts.done(Op::Read, 512)));
            }
        });
        let counted = counts.snapshot();
        assert_eq!((counted.reads, counted.read_bytes), (40_000, 40_000 * 512));
    }
}
