//! Per-CPU counters of a device's operations.

use super::Counter;
use crate::device::{Op, Request, Result, TryResult};
use crate::percpu::Counters;

// Indexes of the counters. Each operation's number is the index of its counter; adding BYTES gives its byte
// counter, so counting needs no branch. The byte counter of flushes is not used.
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
pub struct OpStats {
    /// Number of successful reads.
    pub reads: u64,
    /// Number of successful writes, without zone appends.
    pub writes: u64,
    /// Number of successful discards.
    pub discards: u64,
    /// Number of successful write zeroes requests.
    pub zeroes: u64,
    /// Number of successful flushes.
    pub flushes: u64,
    /// Number of successful zone appends.
    pub appends: u64,
    /// Number of bytes read.
    pub read_bytes: u64,
    /// Number of bytes written or appended.
    pub written_bytes: u64,
    /// Number of failed operations of all kinds.
    pub errors: u64,
    /// Number of bytes discarded.
    pub discarded_bytes: u64,
    /// Number of bytes zeroed.
    pub zeroed_bytes: u64,
    /// Number of submitted requests that have not completed yet, if counted by
    /// [`count_start`](OpCounts::count_start).
    pub in_flight: u64,
    /// Number of requests delayed by [limits](crate::limits) of the device or the access path.
    pub limited: u64,
}

impl OpStats {
    /// Adds the values of `other`.
    pub fn add(&mut self, other: &Self) {
        *self = self.combine(other, u64::wrapping_add);
    }

    /// Returns the differences from earlier values. `in_flight` keeps its present value.
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

    /// Returns the number of successful requests of a kind.
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

    /// Returns the number of bytes that requests of a kind transferred, discarded or zeroed. Bytes of appends
    /// are counted with the writes, so appends have none.
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
    pub const fn completed_requests(&self) -> u64 {
        let data = self.reads + self.writes + self.appends;
        data + self.discards + self.zeroes + self.flushes + self.errors
    }
}

impl OpCounts {
    /// Counts the outcome of a tried request: the bytes if the request made progress, the operation if it
    /// ended. A request that would block is counted when its submission completes.
    #[inline]
    pub fn count_try(&self, request: &Request, outcome: &Result<TryResult>) {
        match outcome {
            Ok(TryResult::Done) => self.count_success(request.op, request.len),
            Ok(TryResult::Partly(bytes)) => self.bytes(request.op, *bytes),
            Ok(TryResult::WouldBlock) => {}
            Err(_) => self.count_error(),
        }
    }

    /// Counts the outcome of a submitted request.
    #[inline]
    pub fn count_completion(&self, request: &Request, outcome: &Result<()>) {
        match outcome {
            Ok(()) => self.count_success(request.op, request.len),
            Err(_) => self.count_error(),
        }
    }

    /// Counts the outcome of an append of `bytes` bytes.
    #[inline]
    pub fn count_append<T>(&self, bytes: u64, outcome: &Result<T>) {
        match outcome {
            Ok(_) => self.0.add_both([(APPENDS, 1), (WRITTEN_BYTES, bytes as i64)]),
            Err(_) => self.count_error(),
        }
    }

    /// Counts a successful operation, and its last `bytes` bytes, which were not counted yet.
    #[inline]
    pub fn count_success(&self, op: Op, bytes: u64) {
        self.0.add_both([(op as usize, 1), (BYTES + op as usize, bytes as i64)]);
    }

    /// Counts a submitted request as in flight until [`count_end`](Self::count_end).
    pub fn count_start(&self) {
        self.0.add(IN_FLIGHT, 1);
    }

    /// Counts a submitted request as completed.
    pub fn count_end(&self) {
        self.0.add(IN_FLIGHT, -1);
    }

    /// Counts a request delayed by limits.
    pub fn count_limited(&self) {
        self.0.add(LIMITED, 1);
    }

    /// Counts a failed operation.
    #[cold]
    pub fn count_error(&self) {
        self.0.add(ERRORS, 1);
    }

    #[inline]
    fn bytes(&self, op: Op, bytes: u64) {
        self.0.add(BYTES + op as usize, bytes as i64);
    }

    /// Returns the values of all counters, which are exact if no request is counted meanwhile.
    pub fn snapshot(&self) -> OpStats {
        let get = |counter| self.0.get(counter);
        OpStats {
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
        counts.count_try(&read, &Ok(TryResult::Partly(4096)));
        counts.count_try(&read.rest(4096), &Ok(TryResult::WouldBlock));
        counts.count_completion(&read.rest(4096), &Ok(()));
        counts.count_try(&Request::write(0, 512), &Ok(TryResult::Done));
        counts.count_try(&Request::write(0, 512), &Err(Error::Media));
        counts.count_completion(&Request::flush(), &Ok(()));
        counts.count_completion(&Request::flush(), &Err(Error::Gone));
        counts.count_try(&Request::new(Op::Discard, 0, 1536), &Ok(TryResult::Partly(1024)));
        counts.count_try(&Request::new(Op::Discard, 1024, 512), &Ok(TryResult::Done));
        counts.count_start();
        counts.count_start();
        counts.count_end();
        counts.count_limited();
        counts.count_try(&Request::new(Op::WriteZeroes, 0, 512), &Ok(TryResult::Done));
        counts.count_append(1024, &Ok(77));
        counts.count_append(1024, &Err::<u64, _>(Error::ZoneCondition));
        let expected = OpStats {
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
        counts.count_success(Op::Write, 512);
        counts.count_start();
        let before = counts.snapshot();
        counts.count_success(Op::Write, 1024);
        counts.count_error();
        let after = counts.snapshot();
        let expected =
            OpStats { writes: 1, written_bytes: 1024, errors: 1, in_flight: 1, ..OpStats::default() };
        assert_eq!(after.since(&before), expected);
        assert_eq!((expected.completed_requests(), expected.bytes(Counter::Write)), (2, 1024));
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
                scope.spawn(|| (0..10_000).for_each(|_| counts.count_success(Op::Read, 512)));
            }
        });
        let counted = counts.snapshot();
        assert_eq!((counted.reads, counted.read_bytes), (40_000, 40_000 * 512));
    }
}
