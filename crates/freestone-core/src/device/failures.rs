//! Counters of a device's failed requests by reason, and rate-limited logging of failures.

use std::fmt;

use super::{Error, Op};
use crate::log_limit::{LogLimit, SuppressedLines};
use crate::sync::{AtomicU64, Ordering};

/// Kind of a failed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// A read, or a query of extents.
    Read,
    /// A write or write zeroes.
    Write,
    /// A discard.
    Trim,
    /// A flush.
    Flush,
}

impl From<Op> for FailureKind {
    fn from(op: Op) -> Self {
        match op {
            Op::Read => Self::Read,
            Op::Write | Op::WriteZeroes => Self::Write,
            Op::Discard => Self::Trim,
            Op::Flush => Self::Flush,
        }
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Trim => "trim",
            Self::Flush => "flush",
        })
    }
}

/// Counters of a device's failed requests, over all exports of the device.
#[derive(Default)]
pub struct Failures {
    counts: [AtomicU64; Error::ALL.len()],
    lines: LogLimit<(FailureKind, Error)>,
}

impl Failures {
    /// Counts a failure. Returns `Some` if the caller must log the failure, at most once a minute for each
    /// kind and reason. Returns `None` for client errors and requests to a removed device.
    #[cold]
    pub fn count(&self, kind: FailureKind, error: Error) -> Option<SuppressedLines> {
        // Relaxed: the count is a statistic, which orders no other data.
        self.counts[error as usize].fetch_add(1, Ordering::Relaxed);
        match error {
            Error::OutOfRange | Error::Misaligned | Error::ReadOnly | Error::Unsupported | Error::Gone => {
                None
            }
            Error::NoSpace
            | Error::NoMemory
            | Error::Media
            | Error::ZoneWritePointer
            | Error::ZoneCondition
            | Error::ZoneBoundary
            | Error::ZoneTooManyOpen
            | Error::ZoneTooManyActive => self.lines.admit((kind, error)),
        }
    }

    /// Returns each reason that occurred, with its number of failures.
    pub fn counts(&self) -> impl Iterator<Item = (Error, u64)> {
        // Relaxed: the count is a statistic, which orders no other data.
        let counted =
            Error::ALL.iter().map(|error| (*error, self.counts[*error as usize].load(Ordering::Relaxed)));
        counted.filter(|(_, count)| *count > 0)
    }
}

impl fmt::Debug for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.counts()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_logs_device_errors_only() {
        let failures = Failures::default();
        for error in Error::ALL {
            let logged = failures.count(FailureKind::Write, error).is_some();
            assert_eq!(failures.count(FailureKind::Write, error), None, "{error}: twice in a minute");
            let is_client_error =
                matches!(error, Error::OutOfRange | Error::Misaligned | Error::ReadOnly | Error::Unsupported);
            assert_eq!(logged, !is_client_error && error != Error::Gone, "{error}");
        }
        assert!(failures.count(FailureKind::Flush, Error::Media).is_some(), "a flush is another kind");
        let counts: Vec<_> = failures.counts().collect();
        assert!(counts.iter().map(|(error, _)| *error).eq(Error::ALL), "{counts:?}");
        assert!(counts.iter().all(|(error, count)| *count == if *error == Error::Media { 3 } else { 2 }));
        assert_eq!(Failures::default().counts().count(), 0);
    }
}
