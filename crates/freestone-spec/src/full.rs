//! Behaviour of a family of RAM disks when its memory limit is reached: the keys `full`,
//! `full_timeout` and `full_warn`, which are also settable attributes.

use std::time::Duration;

use freestone::ram::WhenFull;
use serde_json::{Value, json};

use crate::entries::SpecError;
use crate::keys::Keys;

/// Keys of this behaviour.
pub(crate) const KEYS: [&str; 3] = ["full", "full_timeout", "full_warn"];
/// Largest `full_timeout`, in seconds: a day.
const TIMEOUT_SECONDS_MAX: u64 = 86_400;

/// Value of `full` of a fork that behaves as its family.
const FAMILY: &str = "family";

/// Parses the keys.
pub(crate) fn take(keys: &Keys) -> Result<WhenFull, SpecError> {
    let default = WhenFull::default();
    Ok(WhenFull {
        wait: keys.take("full", parse_wait)?.unwrap_or(default.wait),
        timeout: keys.take("full_timeout", parse_timeout)?.unwrap_or(default.timeout),
        warn_percent: keys.take("full_warn", parse_warn)?.unwrap_or(default.warn_percent),
    })
}

/// Returns the value of an attribute.
pub(crate) fn value(when: WhenFull, attr: &str) -> Option<Value> {
    Some(match attr {
        "full" => json!(if when.wait { "wait" } else { "error" }),
        "full_timeout" => json!(when.timeout.as_secs()),
        "full_warn" => json!(when.warn_percent),
        _ => return None,
    })
}

/// A change of one of the attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FullChange {
    /// `full`: writes wait for space.
    Wait(bool),
    /// `full_timeout`.
    Timeout(Duration),
    /// `full_warn`, in percent; 0 is off.
    Warn(u8),
}

impl FullChange {
    /// Parses a value. Returns None if this module has no such attribute.
    pub(crate) fn check(attr: &str, text: &str) -> Option<Result<Self, String>> {
        Some(match attr {
            "full" => parse_wait(text).map(Self::Wait),
            "full_timeout" => parse_timeout(text).map(Self::Timeout),
            "full_warn" => parse_warn(text).map(Self::Warn),
            _ => return None,
        })
    }

    /// Returns `when` with this change.
    pub(crate) fn applied_to(self, when: WhenFull) -> WhenFull {
        match self {
            Self::Wait(wait) => WhenFull { wait, ..when },
            Self::Timeout(timeout) => WhenFull { timeout, ..when },
            Self::Warn(warn_percent) => WhenFull { warn_percent, ..when },
        }
    }
}

/// Parses `full` of a fork: a value of its own, or `family` (None).
pub(crate) fn parse_own(text: &str) -> Result<Option<bool>, String> {
    match text {
        FAMILY => Ok(None),
        _ => parse_wait(text).map(Some).map_err(|_| format!("must be error, wait or {FAMILY}")),
    }
}

/// Formats `full` of a fork as it is typed.
pub(crate) fn own_value(wait: Option<bool>) -> Value {
    json!(wait.map_or(FAMILY, |wait| if wait { "wait" } else { "error" }))
}

fn parse_wait(text: &str) -> Result<bool, String> {
    match text {
        "wait" => Ok(true),
        "error" => Ok(false),
        _ => Err("must be error or wait".into()),
    }
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds @ 1..=TIMEOUT_SECONDS_MAX) => Ok(Duration::from_secs(seconds)),
        _ => Err(format!("must be the seconds a write waits at most, 1 to {TIMEOUT_SECONDS_MAX}")),
    }
}

fn parse_warn(text: &str) -> Result<u8, String> {
    match text.strip_suffix('%').unwrap_or(text).parse() {
        Ok(percent @ 1..=100) => Ok(percent),
        _ if matches!(text, "0" | "no" | "off") => Ok(0),
        _ => Err("must be a share of the limit, 1% to 100%, or off".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_values_can_be_set_again() {
        for (attr, good, bad) in [
            ("full", &["wait", "error"][..], &["yes", "", "Wait"][..]),
            ("full_timeout", &["1", "60", "86400"], &["0", "86401", "-1", "1m", "none", ""]),
            (
                "full_warn",
                &["1", "90", "90%", "100%", "0", "off", "no"],
                &["101%", "0.9", "%", "-1", "0%", ""],
            ),
        ] {
            for text in good {
                let change = FullChange::check(attr, text).unwrap().unwrap();
                let shown = match value(change.applied_to(WhenFull::default()), attr).unwrap() {
                    Value::String(word) => word,
                    number => number.to_string(),
                };
                assert_eq!(FullChange::check(attr, &shown), Some(Ok(change)), "{attr}={text}");
            }
            for text in bad {
                let sentence = FullChange::check(attr, text).unwrap().unwrap_err();
                assert!(sentence.starts_with("must be "), "{attr}={text}: {sentence}");
            }
        }
        assert!(KEYS.iter().all(|key| value(WhenFull::default(), key).is_some()));
        for (text, own_wait) in [("wait", Some(true)), ("error", Some(false)), ("family", None)] {
            assert_eq!((parse_own(text), own_value(own_wait)), (Ok(own_wait), json!(text)));
        }
        assert_eq!(parse_own("yes"), Err("must be error, wait or family".into()));
        assert_eq!((FullChange::check("fill", "wait"), value(WhenFull::default(), "fill")), (None, None));
    }
}
