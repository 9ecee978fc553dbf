//! What a file says of metrics.

use std::ops::RangeInclusive;

use toml::de::DeValue;

use crate::numbers::{integer, within};

/// What `metrics_forks` can be.
pub const FORKS_RANGE: RangeInclusive<i64> = 0..=1000;

/// Its words, unchecked but for the number.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct MetricsWords {
    /// Where Prometheus asks: `metrics`.
    pub address: Option<String>,
    /// Others than this machine's users may: `metrics_open`.
    pub open: bool,
    /// Forks that are told one by one: `metrics_forks`.
    pub forks: Option<u32>,
}

impl MetricsWords {
    /// Takes a key of the file. The error is a sentence.
    pub fn take(&mut self, key: &str, value: &DeValue<'_>) -> Result<(), String> {
        match (key, value) {
            ("metrics", DeValue::String(address)) => self.address = Some(address.clone().into_owned()),
            ("metrics", value) => {
                let must = "metrics: must be a port, or an address as a text, for example '127.0.0.1:9100'";
                self.address = Some(integer(value).ok_or(must)?.to_string());
            }
            ("metrics_open", DeValue::Boolean(yes)) => self.open = *yes,
            ("metrics_open", _) => return Err("metrics_open: must be true or false".into()),
            _ => self.forks = Some(within("metrics_forks", value, FORKS_RANGE)?),
        }
        Ok(())
    }
}
