//! Behavior of a family of RAM disks (disks that share a memory pool) when its memory limit is
//! reached: the keys `full`, `full_timeout` and `mem_warn_threshold`, which are also settable attributes.

use std::time::Duration;

use freestone::ram::FullPolicy;
use serde_json::{Value, json};

use crate::entries::SpecError;
use crate::keys::Keys;

/// Keys that select the behavior when the memory limit is reached.
pub(crate) const KEYS: [&str; 3] = ["full", "full_timeout", "mem_warn_threshold"];
/// Largest value of `full_timeout` in seconds: a day.
const TIMEOUT_SECONDS_MAX: u64 = 86_400;

/// Value of the key `full` of a fork that uses the behavior of its family.
const FAMILY: &str = "family";

/// Parses the values of [`KEYS`] in a device specification. Keys that are not set have the default
/// value.
pub(crate) fn take(keys: &Keys) -> Result<FullPolicy, SpecError> {
    let default = FullPolicy::default();
    Ok(FullPolicy {
        wait: keys.take("full", parse_wait)?.unwrap_or(default.wait),
        timeout: keys.take("full_timeout", parse_timeout)?.unwrap_or(default.timeout),
        warn_percent: keys.take("mem_warn_threshold", parse_warn)?.unwrap_or(default.warn_percent),
    })
}

/// Returns the value of one of the attributes [`KEYS`], or `None` for another attribute.
pub(crate) fn value(when: FullPolicy, attr: &str) -> Option<Value> {
    Some(match attr {
        "full" => json!(if when.wait { "wait" } else { "error" }),
        "full_timeout" => json!(when.timeout.as_secs()),
        "mem_warn_threshold" => json!(when.warn_percent),
        _ => return None,
    })
}

/// Change of `full`, `full_timeout` or `mem_warn_threshold`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WhenFullChange {
    /// New value of `full`: true if writes wait for memory, false if they fail.
    Wait(bool),
    /// New value of `full_timeout`, the maximum time that a write waits for memory.
    Timeout(Duration),
    /// New value of `mem_warn_threshold`: the share of the limit at which a warning is logged, in percent; 0
    /// is off.
    Warn(u8),
}

impl WhenFullChange {
    /// Parses the new value of an attribute. Returns `None` if `attr` is not in [`KEYS`].
    pub(crate) fn check(attr: &str, text: &str) -> Option<Result<Self, String>> {
        Some(match attr {
            "full" => parse_wait(text).map(Self::Wait),
            "full_timeout" => parse_timeout(text).map(Self::Timeout),
            "mem_warn_threshold" => parse_warn(text).map(Self::Warn),
            _ => return None,
        })
    }

    /// Returns the policy `when` with this change applied.
    pub(crate) fn applied_to(self, when: FullPolicy) -> FullPolicy {
        match self {
            Self::Wait(wait) => FullPolicy { wait, ..when },
            Self::Timeout(timeout) => FullPolicy { timeout, ..when },
            Self::Warn(warn_percent) => FullPolicy { warn_percent, ..when },
        }
    }
}

/// Parses the value of `full` of a fork: `wait` or `error`, or `family` (returns `None`) to use the
/// behavior of the family.
pub(crate) fn parse_own(text: &str) -> Result<Option<bool>, String> {
    match text {
        FAMILY => Ok(None),
        _ => parse_wait(text).map(Some).map_err(|_| format!("must be error, wait or {FAMILY}")),
    }
}

/// Returns the value of `full` of a fork in the form that [`parse_own`] accepts.
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
                "mem_warn_threshold",
                &["1", "90", "90%", "100%", "0", "off", "no"],
                &["101%", "0.9", "%", "-1", "0%", ""],
            ),
        ] {
            for text in good {
                let change = WhenFullChange::check(attr, text).unwrap().unwrap();
                let shown = match value(change.applied_to(FullPolicy::default()), attr).unwrap() {
                    Value::String(word) => word,
                    number => number.to_string(),
                };
                assert_eq!(WhenFullChange::check(attr, &shown), Some(Ok(change)), "{attr}={text}");
            }
            for text in bad {
                let sentence = WhenFullChange::check(attr, text).unwrap().unwrap_err();
                assert!(sentence.starts_with("must be "), "{attr}={text}: {sentence}");
            }
        }
        assert!(KEYS.iter().all(|key| value(FullPolicy::default(), key).is_some()));
        for (text, own_wait) in [("wait", Some(true)), ("error", Some(false)), ("family", None)] {
            assert_eq!((parse_own(text), own_value(own_wait)), (Ok(own_wait), json!(text)));
        }
        assert_eq!(parse_own("yes"), Err("must be error, wait or family".into()));
        assert_eq!(
            (WhenFullChange::check("fill", "wait"), value(FullPolicy::default(), "fill")),
            (None, None)
        );
    }
}
