//! What a file says of metrics.

use std::ops::RangeInclusive;

use toml::de::DeValue;

use crate::http::HttpWords;
use crate::numbers::within;

/// What `metrics_forks` can be.
pub const FORKS_RANGE: RangeInclusive<i64> = 0..=1000;

/// Its words, unchecked but for the number.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct MetricsWords {
    /// Where Prometheus asks: `metrics` and `metrics_open`.
    pub http: HttpWords,
    /// Forks that are told one by one: `metrics_forks`.
    pub forks: Option<u32>,
}

impl MetricsWords {
    /// Takes a key of the file. The error is a sentence.
    pub fn take(&mut self, key: &str, value: &DeValue<'_>) -> Result<(), String> {
        match key {
            "metrics_forks" => self.forks = Some(within(key, value, FORKS_RANGE)?),
            _ => self.http.take(key, value)?,
        }
        Ok(())
    }
}
