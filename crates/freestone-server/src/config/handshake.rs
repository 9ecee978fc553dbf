//! Limits of NBD clients during the handshake, before they have selected an export: the keys
//! `max_pending_handshakes`, `handshake_grace`, `max_connect_rate`, `handshake_idle_timeout`,
//! `handshake_timeout` and `handshake_bytes`.

use std::ops::RangeInclusive;
use std::time::Duration;

use freestone_spec::numbers::parse_in_range;
use freestone_spec::{size, times};
use toml::de::DeValue;

/// Allowed values of `max_pending_handshakes`, a number of connections.
pub const MAX_PENDING_HANDSHAKES_RANGE: RangeInclusive<i64> = 1..=65_536;
/// Allowed values of `max_connect_rate`, a number of connections per second.
pub const CONNECTS_RANGE: RangeInclusive<i64> = 1..=1_000_000;
/// Smallest and largest value of `handshake_grace`, `handshake_idle_timeout` and `handshake_timeout`.
pub const TIMES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60 * 60));
/// Smallest and largest value of `handshake_bytes`, in bytes.
pub const BYTES: (u64, u64) = (4 << 10, 64 << 10);

/// Handshake limits from a configuration. Values that are `None` use the server's defaults.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct HandshakeWords {
    /// Maximum number of connections that have not yet selected an export.
    pub max_pending_handshakes: Option<u32>,
    /// Time during which a pending connection is not closed in favour of a new one.
    pub handshake_grace: Option<Duration>,
    /// Maximum number of connections that the server accepts per second.
    pub max_connect_rate: Option<u32>,
    /// Time after which a client that sends nothing during the handshake is disconnected.
    pub handshake_idle_timeout: Option<Duration>,
    /// Time after which a client that has not selected an export is disconnected.
    pub handshake_timeout: Option<Duration>,
    /// Maximum number of bytes accepted from a client before TLS starts, if TLS is required.
    pub handshake_bytes: Option<u64>,
}

/// Parses the value of `handshake_grace`, `handshake_idle_timeout` or `handshake_timeout`.
///
/// # Errors
/// Returns the reason, which the caller puts after `KEY=TEXT: `.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    times::parse_in_range(text, TIMES)
}

/// Parses the value of `handshake_bytes`.
///
/// # Errors
/// Returns the reason, which the caller puts after `KEY=TEXT: `.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text).map_err(|error| error.to_string())?;
    let (least, most) = BYTES;
    if (least..=most).contains(&bytes) {
        Ok(bytes)
    } else {
        Err(format!("must be {} to {}", size::exact(least), size::exact(most)))
    }
}

impl HandshakeWords {
    /// Sets the value of a key of the configuration file.
    ///
    /// # Errors
    /// Returns a message that names the key.
    pub fn take(&mut self, key: &str, value: &DeValue<'_>) -> Result<(), String> {
        if key == "max_pending_handshakes" {
            self.max_pending_handshakes = Some(parse_in_range(key, value, MAX_PENDING_HANDSHAKES_RANGE)?);
            return Ok(());
        }
        if key == "max_connect_rate" {
            self.max_connect_rate = Some(parse_in_range(key, value, CONNECTS_RANGE)?);
            return Ok(());
        }
        let DeValue::String(text) = value else {
            let like = if key == "handshake_bytes" {
                "a size as a text, for example '16K'"
            } else {
                "a time as a text, for example '10s'"
            };
            return Err(format!("{key}: must be {like}"));
        };
        let value_error = |why: String| format!("{key}={text}: {why}");
        let field = match key {
            "handshake_bytes" => {
                self.handshake_bytes = Some(parse_bytes(text).map_err(value_error)?);
                return Ok(());
            }
            "handshake_grace" => &mut self.handshake_grace,
            "handshake_idle_timeout" => &mut self.handshake_idle_timeout,
            _ => &mut self.handshake_timeout,
        };
        *field = Some(parse_time(text).map_err(value_error)?);
        Ok(())
    }

    /// Returns these values. Values that are not set are taken from `others`.
    #[must_use]
    pub fn or(&self, others: &Self) -> Self {
        Self {
            max_pending_handshakes: self.max_pending_handshakes.or(others.max_pending_handshakes),
            handshake_grace: self.handshake_grace.or(others.handshake_grace),
            max_connect_rate: self.max_connect_rate.or(others.max_connect_rate),
            handshake_idle_timeout: self.handshake_idle_timeout.or(others.handshake_idle_timeout),
            handshake_timeout: self.handshake_timeout.or(others.handshake_timeout),
            handshake_bytes: self.handshake_bytes.or(others.handshake_bytes),
        }
    }
}
