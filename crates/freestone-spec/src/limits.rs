//! I/O and connection limits of devices and exports: operations and bytes per second, and number of
//! connections.

use std::io;

use freestone::limits::{
    BURST_BYTES_MIN, BYTES_PER_SECOND_MAX, BYTES_PER_SECOND_MIN, Limits, OPERATIONS_MAX,
};
use serde_json::{Map, Value, json};
use toml::de::DeValue;

use crate::entries::{Entries, SpecError};
use crate::numbers::integer;
use crate::{schema, size};

/// Keys of the limits, which every device and export supports.
pub const KEYS: [&str; 5] = schema::names(schema::LIMITS);
/// Largest value of `max_clients`, the maximum number of connections.
pub const MAX_CLIENTS: u32 = 65_536;

/// Limits of a device or an export. 0 means unlimited; a burst of 0 means the default burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LimitSpec {
    /// Limits of operations and bytes per second.
    pub rates: Limits,
    /// Maximum number of connections, up to [`MAX_CLIENTS`].
    pub max_clients: u32,
}

/// New values of limits, in the order of [`KEYS`]. `None` keeps the present limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LimitWords([Option<u64>; KEYS.len()]);

impl LimitWords {
    /// Sets the value of a key. Returns false if the key is not a limit.
    ///
    /// # Errors
    /// Returns the reason, which the caller puts after `KEY=TEXT: `.
    pub fn take(&mut self, key: &str, text: &str) -> Result<bool, String> {
        let Some(index) = KEYS.iter().position(|known| *known == key) else { return Ok(false) };
        self.0[index] = Some(parse(key, text)?);
        Ok(true)
    }

    /// Returns true if no limit has a new value.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// Returns the new value of `max_clients`, or `None` if it was not set.
    pub fn max_clients(&self) -> Option<u64> {
        self.0[4]
    }

    /// Returns `limits` with the new values applied.
    #[must_use]
    pub fn apply_to(&self, limits: LimitSpec) -> LimitSpec {
        let [iops, bps, iops_burst, bps_burst, max_clients] = self.0;
        let LimitSpec { rates, max_clients: clients } = limits;
        LimitSpec {
            rates: Limits {
                iops: iops.unwrap_or(rates.iops),
                bps: bps.unwrap_or(rates.bps),
                iops_burst: iops_burst.unwrap_or(rates.iops_burst),
                bps_burst: bps_burst.unwrap_or(rates.bps_burst),
            },
            // The parser checked the range of `max_clients`, so the conversion cannot fail.
            max_clients: max_clients.and_then(|most| u32::try_from(most).ok()).unwrap_or(clients),
        }
    }
}

impl LimitSpec {
    /// Parses the limits in a device specification, and removes their keys from `entries`.
    pub(crate) fn take(entries: &mut Entries) -> Result<Self, SpecError> {
        let (name, mut words) = (entries.name.clone(), LimitWords::default());
        for (key, value) in &entries.pairs {
            words.take(key, value).map_err(|why| SpecError::Value {
                name: name.clone(),
                key: key.clone(),
                value: value.clone(),
                why,
            })?;
        }
        entries.pairs.retain(|(key, _)| !KEYS.contains(&key.as_str()));
        Ok(words.apply_to(Self::default()))
    }

    /// Returns true if no limit is set.
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the limit of a key in bytes or as a count, or `None` if the key is not a limit. 0
    /// means unlimited; a burst of 0 means the default burst.
    pub fn value(&self, key: &str) -> Option<u64> {
        let Self { rates: Limits { iops, bps, iops_burst, bps_burst }, max_clients } = *self;
        let all = [iops, bps, iops_burst, bps_burst, max_clients.into()];
        KEYS.iter().position(|known| *known == key).map(|index| all[index])
    }

    /// Returns the key and value of each limit that is not 0.
    pub fn nonzero(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let this = *self;
        KEYS.into_iter().filter_map(move |key| Some((key, this.value(key)?))).filter(|(_, value)| *value > 0)
    }

    /// Returns the key and text of each limit that is not 0. Texts have the form of a
    /// specification.
    pub fn words(&self) -> impl Iterator<Item = (&'static str, String)> {
        self.nonzero().map(|(key, value)| {
            let text = if key.starts_with("bps") { size::exact(value) } else { value.to_string() };
            (key, text)
        })
    }

    /// Returns the limits for `stat`, with the effective bursts, or `None` if no limit is set.
    pub fn stat(&self) -> Option<Value> {
        if self.is_unlimited() {
            return None;
        }
        let mut stat: Map<String, Value> =
            KEYS.into_iter().map(|key| (key.to_owned(), json!(self.value(key)))).collect();
        if self.rates.iops > 0 {
            stat.insert("iops_burst".into(), json!(self.rates.burst_operations()));
        }
        if self.rates.bps > 0 {
            stat.insert("bps_burst".into(), json!(self.rates.burst_bytes()));
        }
        Some(Value::Object(stat))
    }
}

/// Parses a limit of an export in a configuration file. The error message names the key.
pub fn take_toml(words: &mut LimitWords, key: &str, value: &DeValue<'_>) -> Result<(), String> {
    let text = match (value, integer(value)) {
        (DeValue::String(text), _) => text.to_string(),
        (_, Some(number)) => number.to_string(),
        _ => return Err(format!("{key}: must be a number or a text")),
    };
    words.take(key, &text).map(drop).map_err(|why| format!("{key}={text}: {why}"))
}

/// Returns the error message if the thread that enforces limits could not be started.
pub(crate) fn thread_error(error: &io::Error) -> String {
    format!("limits need a thread, which cannot be started: {error}")
}

/// Parses the value of a limit key. `0` and `none` return 0.
fn parse(key: &str, text: &str) -> Result<u64, String> {
    let (zero_meaning, is_size, least, most) = match key {
        "iops" => ("no limit", false, 1, OPERATIONS_MAX),
        "iops_burst" => ("a tenth of iops", false, 1, OPERATIONS_MAX),
        "bps" => ("no limit", true, BYTES_PER_SECOND_MIN, BYTES_PER_SECOND_MAX),
        "bps_burst" => ("a tenth of bps", true, BURST_BYTES_MIN, BYTES_PER_SECOND_MAX),
        _ => ("no limit", false, 1, u64::from(MAX_CLIENTS)),
    };
    if text == "0" || text == "none" {
        return Ok(0);
    }
    let shown = |value: u64| if is_size { size::exact(value) } else { value.to_string() };
    let range = || format!("must be {} to {}; 0 is {zero_meaning}", shown(least), shown(most));
    let value = if is_size {
        size::parse(text).map_err(|error| format!("{error}; 0 is {zero_meaning}"))?
    } else {
        text.parse().map_err(|_| range())?
    };
    if (least..=most).contains(&value) { Ok(value) } else { Err(range()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_outside_range_is_refused() {
        for (key, text, value) in [
            ("iops", "1", 1),
            ("iops", "none", 0),
            ("iops_burst", "10000000", 10_000_000),
            ("bps", "4K", 4096),
            ("bps", "1T", 1 << 40),
            ("bps_burst", "0", 0),
            ("max_clients", "65536", 65_536),
        ] {
            assert_eq!(parse(key, text), Ok(value), "{key}={text}");
        }
        for (key, text, why) in [
            ("iops", "10000001", "must be 1 to 10000000; 0 is no limit"),
            ("iops", "-1", "must be 1 to 10000000; 0 is no limit"),
            ("iops", "1K", "must be 1 to 10000000; 0 is no limit"),
            ("iops_burst", "x", "must be 1 to 10000000; 0 is a tenth of iops"),
            ("bps", "100", "give a unit; 100M? (K, M, G and T are known, 1024-based); 0 is no limit"),
            ("bps", "1K", "must be 4K to 1T; 0 is no limit"),
            ("bps_burst", "2T", "must be 4K to 1T; 0 is a tenth of bps"),
            ("max_clients", "65537", "must be 1 to 65536; 0 is no limit"),
        ] {
            assert_eq!(parse(key, text), Err(why.to_owned()), "{key}={text}");
        }
    }

    #[test]
    fn limits_not_set_keep_their_value() {
        let mut words = LimitWords::default();
        assert_eq!(words.take("iop", "1"), Ok(false));
        assert!(words.is_empty());
        let mut entries: Entries = Entries::parse("d=ram,iops=7,disksize=1M,bps=1M,max_clients=3").unwrap();
        let limits = LimitSpec::take(&mut entries).unwrap();
        assert_eq!(entries.pairs, [("disksize".to_owned(), "1M".to_owned())]);
        assert_eq!(words.take("iops", "0"), Ok(true));
        assert_eq!(words.take("iops_burst", "9"), Ok(true));
        let changed = words.apply_to(limits);
        let words: Vec<_> = changed.words().collect();
        let expected = [("bps", "1M"), ("iops_burst", "9"), ("max_clients", "3")];
        assert_eq!(words, expected.map(|(key, value)| (key, value.to_owned())));
        assert_eq!(
            (changed.stat().unwrap()["bps_burst"].clone(), changed.value("iops")),
            (json!(104_857), Some(0))
        );
        assert_eq!(LimitSpec::default().stat(), None);
    }
}
