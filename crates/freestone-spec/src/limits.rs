//! What a device and an export let through: operations and bytes a second, and connections.

use std::io;

use freestone::limits::{
    BURST_BYTES_MIN, BYTES_PER_SECOND_MAX, BYTES_PER_SECOND_MIN, Limits, OPERATIONS_MAX,
};
use serde_json::{Map, Value, json};
use toml::de::DeValue;

use crate::entries::{Entries, SpecError};
use crate::numbers::integer;
use crate::size;

/// The keys, of every device and export.
pub const KEYS: [&str; 5] = ["iops", "bps", "iops_burst", "bps_burst", "max_clients"];
/// Most connections that can be said.
pub const MAX_CLIENTS: u32 = 65_536;

/// The limits of a device or an export; 0 is none, or the usual burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LimitSpec {
    /// Operations and bytes a second.
    pub rates: Limits,
    /// Connections at one time, at most [`MAX_CLIENTS`].
    pub max_clients: u32,
}

/// Some of them, as they were said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LimitWords([Option<u64>; KEYS.len()]);

impl LimitWords {
    /// Takes what was said of a key; false where it is none of these.
    ///
    /// # Errors
    /// Half a sentence that follows the value.
    pub fn take(&mut self, key: &str, text: &str) -> Result<bool, String> {
        let Some(index) = KEYS.iter().position(|known| *known == key) else { return Ok(false) };
        self.0[index] = Some(parse(key, text)?);
        Ok(true)
    }

    /// Whether nothing was said.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// Whether something was said of connections.
    pub fn max_clients(&self) -> Option<u64> {
        self.0[4]
    }

    /// Those limits, with what was said here in place of what they say of it.
    #[must_use]
    pub fn over(&self, limits: LimitSpec) -> LimitSpec {
        let [iops, bps, iops_burst, bps_burst, max_clients] = self.0;
        let LimitSpec { rates, max_clients: clients } = limits;
        LimitSpec {
            rates: Limits {
                iops: iops.unwrap_or(rates.iops),
                bps: bps.unwrap_or(rates.bps),
                iops_burst: iops_burst.unwrap_or(rates.iops_burst),
                bps_burst: bps_burst.unwrap_or(rates.bps_burst),
            },
            // It was parsed within its range.
            max_clients: max_clients.and_then(|most| u32::try_from(most).ok()).unwrap_or(clients),
        }
    }
}

impl LimitSpec {
    /// Takes them out of the keys of a device.
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
        Ok(words.over(Self::default()))
    }

    /// Whether there are none.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// The value of one, by its key. Bytes and counts; 0 is none, or the usual burst.
    pub fn value(&self, key: &str) -> Option<u64> {
        let Self { rates: Limits { iops, bps, iops_burst, bps_burst }, max_clients } = *self;
        let all = [iops, bps, iops_burst, bps_burst, max_clients.into()];
        KEYS.iter().position(|known| *known == key).map(|index| all[index])
    }

    /// Those that are not 0, by their keys.
    pub fn said(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let this = *self;
        KEYS.into_iter().filter_map(move |key| Some((key, this.value(key)?))).filter(|(_, value)| *value > 0)
    }

    /// The same as a user would write them.
    pub fn words(&self) -> impl Iterator<Item = (&'static str, String)> {
        self.said().map(|(key, value)| {
            let text = if key.starts_with("bps") { size::exact(value) } else { value.to_string() };
            (key, text)
        })
    }

    /// As `stat` tells them, with the bursts that there are; `None` where there are none.
    pub fn stat(&self) -> Option<Value> {
        if self.is_none() {
            return None;
        }
        let mut told: Map<String, Value> =
            KEYS.into_iter().map(|key| (key.to_owned(), json!(self.value(key)))).collect();
        if self.rates.iops > 0 {
            told.insert("iops_burst".into(), json!(self.rates.operations_at_once()));
        }
        if self.rates.bps > 0 {
            told.insert("bps_burst".into(), json!(self.rates.bytes_at_once()));
        }
        Some(Value::Object(told))
    }
}

/// Takes a key of an export in a file.
pub(crate) fn of_toml(words: &mut LimitWords, key: &str, value: &DeValue<'_>) -> Result<(), String> {
    let text = match (value, integer(value)) {
        (DeValue::String(text), _) => text.to_string(),
        (_, Some(number)) => number.to_string(),
        _ => return Err(format!("{key}: must be a number or a text")),
    };
    words.take(key, &text).map(drop).map_err(|why| format!("{key}={text}: {why}"))
}

/// Why limits could not be set: a thread is missing.
pub(crate) fn unset(error: &io::Error) -> String {
    format!("limits need a thread, which cannot be started: {error}")
}

/// The value of a key.
fn parse(key: &str, text: &str) -> Result<u64, String> {
    let (none, is_size, least, most) = match key {
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
    let range = || format!("must be {} to {}; 0 is {none}", shown(least), shown(most));
    let value = if is_size {
        size::parse(text).map_err(|error| format!("{error}; 0 is {none}"))?
    } else {
        text.parse().map_err(|_| range())?
    };
    if (least..=most).contains(&value) { Ok(value) } else { Err(range()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_their_ranges() {
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
    fn what_is_not_said_stays() {
        let mut words = LimitWords::default();
        assert_eq!(words.take("iop", "1"), Ok(false));
        assert!(words.is_empty());
        let mut entries: Entries = Entries::parse("d=ram,iops=7,disksize=1M,bps=1M,max_clients=3").unwrap();
        let limits = LimitSpec::take(&mut entries).unwrap();
        assert_eq!(entries.pairs, [("disksize".to_owned(), "1M".to_owned())]);
        assert_eq!(words.take("iops", "0"), Ok(true));
        assert_eq!(words.take("iops_burst", "9"), Ok(true));
        let changed = words.over(limits);
        let said: Vec<_> = changed.words().collect();
        let expected = [("bps", "1M"), ("iops_burst", "9"), ("max_clients", "3")];
        assert_eq!(said, expected.map(|(key, value)| (key, value.to_owned())));
        assert_eq!(
            (changed.stat().unwrap()["bps_burst"].clone(), changed.value("iops")),
            (json!(104_857), Some(0))
        );
        assert_eq!(LimitSpec::default().stat(), None);
    }
}
