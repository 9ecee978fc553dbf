//! Parses the metrics keys of a configuration file: `metrics`, `metrics_open` and `metrics_forks`.

use std::ops::RangeInclusive;

use freestone_spec::numbers::parse_in_range;
use toml::de::DeValue;

use super::http::HttpWords;

/// Allowed values of `metrics_forks`, the maximum number of forks with separate metrics.
pub const FORKS_RANGE: RangeInclusive<i64> = 0..=1000;

/// Metrics settings of a configuration file. The address is not checked yet.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct MetricsWords {
    /// Address of the metrics endpoint: `metrics` and `metrics_open`.
    pub http: HttpWords,
    /// Maximum number of forks with separate metrics: `metrics_forks`.
    pub forks: Option<u32>,
}

impl MetricsWords {
    /// Sets the value of a key of the configuration file. The error message names the key.
    pub fn take(&mut self, key: &str, value: &DeValue<'_>) -> Result<(), String> {
        match key {
            "metrics_forks" => self.forks = Some(parse_in_range(key, value, FORKS_RANGE)?),
            _ => self.http.take(key, value)?,
        }
        Ok(())
    }
}
