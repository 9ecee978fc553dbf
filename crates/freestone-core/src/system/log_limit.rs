//! Rate limit for log lines: one line a minute for each kind of event.

use std::fmt;
use std::time::Duration;

use crate::sync::{Instant, Mutex};

/// Minimum time between two log lines of the same kind.
const INTERVAL: Duration = Duration::from_secs(60);

/// Rate limiter of log lines by kind. Kinds are found by linear search, so callers use an enum of few values.
///
/// Lock order: `kinds` is innermost. No event is logged under this lock.
pub struct LogLimit<K> {
    kinds: Mutex<Vec<(K, KindState)>>,
}

struct KindState {
    last: Instant,
    /// Number of events since the last log line, which were not logged.
    suppressed: u64,
}

/// Number of log lines suppressed since the last logged one. Displays as a suffix of the log line, or as an
/// empty string if zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuppressedLines(u64);

impl SuppressedLines {
    /// Returns the number of suppressed lines for a field of an event, or `None` if no line was suppressed.
    pub fn field(self) -> Option<u64> {
        Some(self.0).filter(|lines| *lines > 0)
    }
}

/// Logs an event that a client can cause at any rate, or that a lasting fault repeats. Each call site logs
/// one line a minute at the given level, with the field `suppressed`, and the other events at the level
/// `debug`. Exports log warnings and errors that clients cause only through this macro or a [`LogLimit`].
#[macro_export]
macro_rules! client_log {
    ($level:ident, $($event:tt)+) => {{
        static LINES: ::std::sync::LazyLock<$crate::log_limit::LogLimit<()>> =
            ::std::sync::LazyLock::new(::std::default::Default::default);
        match LINES.admit(()) {
            Some(before) => ::tracing::$level!(suppressed = before.field(), $($event)+),
            None => ::tracing::debug!($($event)+),
        }
    }};
}

impl fmt::Display for SuppressedLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            more => write!(f, "; {more} more since the last such line"),
        }
    }
}

impl<K> Default for LogLimit<K> {
    fn default() -> Self {
        Self { kinds: Mutex::default() }
    }
}

impl<K: Copy + PartialEq> LogLimit<K> {
    /// Records an event. Returns `Some` if the caller must log the event, or `None` if the last line of this
    /// kind is less than a minute old.
    #[cold]
    pub fn admit(&self, kind: K) -> Option<SuppressedLines> {
        self.admit_at(kind, Instant::now())
    }

    fn admit_at(&self, kind: K, now: Instant) -> Option<SuppressedLines> {
        let mut kinds = self.kinds.lock();
        let Some((_, state)) = kinds.iter_mut().find(|(known, _)| *known == kind) else {
            kinds.push((kind, KindState { last: now, suppressed: 0 }));
            return Some(SuppressedLines(0));
        };
        if now - state.last < INTERVAL {
            state.suppressed += 1;
            return None;
        }
        state.last = now;
        Some(SuppressedLines(std::mem::take(&mut state.suppressed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_logs_once_a_minute_with_suppressed_count() {
        let limit = LogLimit::default();
        let start = Instant::now();
        let line = |kind, seconds| {
            limit.admit_at(kind, start + Duration::from_secs(seconds)).map(|held| held.to_string())
        };
        assert_eq!(line("full", 0), Some(String::new()));
        assert_eq!((line("full", 1), line("full", 59)), (None, None));
        assert_eq!(line("damaged", 59), Some(String::new()), "each kind by itself");
        assert_eq!(line("full", 60), Some("; 2 more since the last such line".into()));
        assert_eq!(line("full", 119), None);
        assert_eq!(line("full", 300), Some("; 1 more since the last such line".into()));
        assert_eq!(line("full", 400), Some(String::new()));
    }
}
