//! What of a device's requests failed, counted by reason, and which of it is logged.

use std::fmt;

use super::Error;
use crate::log_limit::{HeldBack, LogLimit};
use crate::sync::{AtomicU64, Ordering};

/// What failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failed {
    /// A read, or a question about what the device holds.
    Read,
    /// A write, of zeroes as well.
    Write,
    /// A discard.
    Trim,
    /// A flush.
    Flush,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Trim => "trim",
            Self::Flush => "flush",
        })
    }
}

/// The failed requests of a device, over all its exports. One that succeeds is not seen here.
#[derive(Default)]
pub struct Failures {
    counts: [AtomicU64; Error::ALL.len()],
    lines: LogLimit<(Failed, Error)>,
}

impl Failures {
    /// Counts a failure. Returned: it is to be logged, one in a minute of its kind, and none that
    /// is the client's own doing or comes with the device's end.
    #[cold]
    pub fn count(&self, failed: Failed, error: Error) -> Option<HeldBack> {
        // Relaxed: a statistic.
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
            | Error::ZoneTooManyActive => self.lines.line((failed, error)),
        }
    }

    /// How many failed for each reason that there was.
    pub fn counts(&self) -> impl Iterator<Item = (Error, u64)> {
        // Relaxed: a statistic.
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
    fn all_are_counted_and_those_of_the_device_are_logged() {
        let failures = Failures::default();
        for error in Error::ALL {
            let logged = failures.count(Failed::Write, error).is_some();
            assert_eq!(failures.count(Failed::Write, error), None, "{error}: twice in a minute");
            let clients =
                matches!(error, Error::OutOfRange | Error::Misaligned | Error::ReadOnly | Error::Unsupported);
            assert_eq!(logged, !clients && error != Error::Gone, "{error}");
        }
        assert!(failures.count(Failed::Flush, Error::Media).is_some(), "a flush is another kind");
        let counts: Vec<_> = failures.counts().collect();
        assert!(counts.iter().map(|(error, _)| *error).eq(Error::ALL), "{counts:?}");
        assert!(counts.iter().all(|(error, count)| *count == if *error == Error::Media { 3 } else { 2 }));
        assert_eq!(Failures::default().counts().count(), 0);
    }
}
