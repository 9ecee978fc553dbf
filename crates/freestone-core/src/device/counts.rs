//! Per-CPU counters of a device's operations.

use super::{Counter, Op, Request, Result, Tried};
use crate::percpu::Counters;

// The counter of an operation has the operation's number; its byte counter follows BYTES later, so no request
// branches. The byte counter of flushes is not used.
const BYTES: usize = 6;
const READS: usize = Op::Read as usize;
const WRITES: usize = Op::Write as usize;
const DISCARDS: usize = Op::Discard as usize;
const ZEROES: usize = Op::WriteZeroes as usize;
const FLUSHES: usize = Op::Flush as usize;
const APPENDS: usize = 5;
const READ_BYTES: usize = BYTES + READS;
const WRITTEN_BYTES: usize = BYTES + WRITES;
const DISCARDED_BYTES: usize = BYTES + DISCARDS;
const ZEROED_BYTES: usize = BYTES + ZEROES;
const ERRORS: usize = 11;
const IN_FLIGHT: usize = 12;
const LIMITED: usize = 13;
const COUNT: usize = 14;
const _: () = assert!(FLUSHES < APPENDS && APPENDS < BYTES && BYTES + FLUSHES < ERRORS);

/// Counters of a device's operations. An update is one or two additions to the CPU's own cells.
#[derive(Default)]
pub struct OpCounts(Counters<COUNT>);

/// Values of [`OpCounts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counted {
    /// Successful reads.
    pub reads: u64,
    /// Successful writes without appends.
    pub writes: u64,
    /// Successful discards.
    pub discards: u64,
    /// Successful write zeroes.
    pub zeroes: u64,
    /// Successful flushes.
    pub flushes: u64,
    /// Successful zone appends.
    pub appends: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written or appended.
    pub written_bytes: u64,
    /// Failed operations.
    pub errors: u64,
    /// Bytes discarded.
    pub discarded_bytes: u64,
    /// Bytes zeroed.
    pub zeroed_bytes: u64,
    /// Submitted requests not completed yet, if counted by [`begun`](OpCounts::begun).
    pub in_flight: u64,
    /// Requests delayed by [limits](crate::limits) of the device or the access path.
    pub limited: u64,
}

impl Counted {
    /// Adds other values.
    pub fn add(&mut self, other: &Self) {
        *self = self.combine(other, u64::wrapping_add);
    }

    /// Returns the difference to earlier values, with the present number of requests in flight.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self { in_flight: self.in_flight, ..self.combine(earlier, u64::saturating_sub) }
    }

    fn combine(&self, other: &Self, combine: fn(u64, u64) -> u64) -> Self {
        Self {
            reads: combine(self.reads, other.reads),
            writes: combine(self.writes, other.writes),
            discards: combine(self.discards, other.discards),
            zeroes: combine(self.zeroes, other.zeroes),
            flushes: combine(self.flushes, other.flushes),
            appends: combine(self.appends, other.appends),
            read_bytes: combine(self.read_bytes, other.read_bytes),
            written_bytes: combine(self.written_bytes, other.written_bytes),
            errors: combine(self.errors, other.errors),
            discarded_bytes: combine(self.discarded_bytes, other.discarded_bytes),
            zeroed_bytes: combine(self.zeroed_bytes, other.zeroed_bytes),
            in_flight: combine(self.in_flight, other.in_flight),
            limited: combine(self.limited, other.limited),
        }
    }

    /// Returns the successful requests of a kind.
    pub const fn requests(&self, counter: Counter) -> u64 {
        match counter {
            Counter::Read => self.reads,
            Counter::Write => self.writes,
            Counter::Discard => self.discards,
            Counter::WriteZeroes => self.zeroes,
            Counter::Flush => self.flushes,
            Counter::Append => self.appends,
        }
    }

    /// Returns the bytes of these requests. Bytes of appends are counted with the writes.
    pub const fn bytes(&self, counter: Counter) -> u64 {
        match counter {
            Counter::Read => self.read_bytes,
            Counter::Write => self.written_bytes,
            Counter::Discard => self.discarded_bytes,
            Counter::WriteZeroes => self.zeroed_bytes,
            Counter::Flush | Counter::Append => 0,
        }
    }

    /// Returns the number of completed requests, successful or not.
    pub const fn answered(&self) -> u64 {
        let data = self.reads + self.writes + self.appends;
        data + self.discards + self.zeroes + self.flushes + self.errors
    }
}

impl OpCounts {
    /// Counts the outcome of a try: bytes if it made progress, the operation if it ended. A request that
    /// would block is counted after its submission.
    #[inline]
    pub fn tried(&self, request: &Request, outcome: &Result<Tried>) {
        match outcome {
            Ok(Tried::Done) => self.done(request.op, request.len),
            Ok(Tried::Partly(bytes)) => self.bytes(request.op, *bytes),
            Ok(Tried::WouldBlock) => {}
            Err(_) => self.error(),
        }
    }

    /// Counts the outcome of a submitted request.
    #[inline]
    pub fn answered(&self, request: &Request, outcome: &Result<()>) {
        match outcome {
            Ok(()) => self.done(request.op, request.len),
            Err(_) => self.error(),
        }
    }

    /// Counts the outcome of an append of `bytes` bytes.
    #[inline]
    pub fn appended<T>(&self, bytes: u64, outcome: &Result<T>) {
        match outcome {
            Ok(_) => self.0.add_both([(APPENDS, 1), (WRITTEN_BYTES, bytes as i64)]),
            Err(_) => self.error(),
        }
    }

    /// Counts a successful operation, and its last `bytes` bytes, which were not counted yet.
    #[inline]
    pub fn done(&self, op: Op, bytes: u64) {
        self.0.add_both([(op as usize, 1), (BYTES + op as usize, bytes as i64)]);
    }

    /// Counts a submitted request as in flight until [`ended`](Self::ended).
    pub fn begun(&self) {
        self.0.add(IN_FLIGHT, 1);
    }

    /// Counts a submitted request as completed.
    pub fn ended(&self) {
        self.0.add(IN_FLIGHT, -1);
    }

    /// Counts a request delayed by limits.
    pub fn limited(&self) {
        self.0.add(LIMITED, 1);
    }

    /// Counts a failed operation.
    #[cold]
    pub fn error(&self) {
        self.0.add(ERRORS, 1);
    }

    #[inline]
    fn bytes(&self, op: Op, bytes: u64) {
        self.0.add(BYTES + op as usize, bytes as i64);
    }

    /// Returns all counters. Exact if nothing is in flight.
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
            limited: get(LIMITED),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Error;

    #[test]
    fn request_counts_once_if_split_or_submitted() {
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
        counts.limited();
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
            limited: 1,
        };
        assert_eq!(counts.snapshot(), expected);
    }

    #[test]
    fn counted_adds_and_subtracts() {
        let counts = OpCounts::default();
        counts.done(Op::Write, 512);
        counts.begun();
        let before = counts.snapshot();
        counts.done(Op::Write, 1024);
        counts.error();
        let after = counts.snapshot();
        let expected =
            Counted { writes: 1, written_bytes: 1024, errors: 1, in_flight: 1, ..Counted::default() };
        assert_eq!(after.since(&before), expected);
        assert_eq!((expected.answered(), expected.bytes(Counter::Write)), (2, 1024));
        let mut sum = before;
        sum.add(&expected);
        assert_eq!((sum.writes, sum.written_bytes, sum.in_flight), (2, 1536, 2));
        assert_eq!(before.since(&after).writes, 0, "an unrelated later state");
    }

    #[test]
    fn concurrent_counts_are_exact() {
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
