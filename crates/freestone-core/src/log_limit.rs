//! Log lines of what can happen many thousand times a second: one a minute for each kind.

use std::fmt;
use std::time::Duration;

use crate::sync::{Instant, Mutex};

/// A kind has one line in so long.
const INTERVAL: Duration = Duration::from_secs(60);

/// Says of each kind whether it has its line now. There are few kinds: who has many of these names
/// them by an enum.
///
/// Lock order: `kinds` is innermost. Nothing is logged under it.
pub struct LogLimit<K> {
    kinds: Mutex<Vec<(K, Told)>>,
}

struct Told {
    last: Instant,
    /// How often it happened since without a line.
    held_back: u64,
}

/// How many lines were held back before this one; written at its end, where there were any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldBack(u64);

impl HeldBack {
    /// The number as a field of an event, or `None` if no line was held back.
    pub fn field(self) -> Option<u64> {
        Some(self.0).filter(|lines| *lines > 0)
    }
}

/// Logs an event that a client can cause as often as it likes, or that a lasting fault repeats: at the given
/// level once a minute for each call site, with the field `suppressed` for those in between, which are logged at the level `debug`.
/// Exports log warnings and errors that clients cause only through this macro or a [`LogLimit`].
#[macro_export]
macro_rules! client_log {
    ($level:ident, $($event:tt)+) => {{
        static LINES: ::std::sync::LazyLock<$crate::log_limit::LogLimit<()>> =
            ::std::sync::LazyLock::new(::std::default::Default::default);
        match LINES.line(()) {
            Some(before) => ::tracing::$level!(suppressed = before.field(), $($event)+),
            None => ::tracing::debug!($($event)+),
        }
    }};
}

impl fmt::Display for HeldBack {
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
    /// It has happened. `None`: there was a line less than a minute ago.
    #[cold]
    pub fn line(&self, kind: K) -> Option<HeldBack> {
        self.line_at(kind, Instant::now())
    }

    fn line_at(&self, kind: K, now: Instant) -> Option<HeldBack> {
        let mut kinds = self.kinds.lock();
        let Some((_, told)) = kinds.iter_mut().find(|(known, _)| *known == kind) else {
            kinds.push((kind, Told { last: now, held_back: 0 }));
            return Some(HeldBack(0));
        };
        if now - told.last < INTERVAL {
            told.held_back += 1;
            return None;
        }
        told.last = now;
        Some(HeldBack(std::mem::take(&mut told.held_back)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_has_a_line_a_minute_which_says_how_many_were_held_back() {
        let limit = LogLimit::default();
        let start = Instant::now();
        let line = |kind, seconds| {
            limit.line_at(kind, start + Duration::from_secs(seconds)).map(|held| held.to_string())
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
