//! What clients may take before they have an export, as it is written: `max_newcomers`,
//! `newcomer_grace`, `connects_per_second`, `handshake_silence`, `handshake_timeout`, `handshake_bytes`.

use std::ops::RangeInclusive;
use std::time::Duration;

use toml::de::DeValue;

use crate::numbers::within;
use crate::{size, times};

/// What `max_newcomers` can be.
pub const MAX_NEWCOMERS_RANGE: RangeInclusive<i64> = 1..=65_536;
/// What `connects_per_second` can be.
pub const CONNECTS_RANGE: RangeInclusive<i64> = 1..=1_000_000;
/// The least and the most of the three times.
pub const TIMES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60 * 60));
/// The least and the most of `handshake_bytes`.
pub const BYTES: (u64, u64) = (4 << 10, 64 << 10);

/// What was said.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct HandshakeWords {
    /// Most connections that have chosen no export.
    pub max_newcomers: Option<u32>,
    /// So long one of these is left alone where others wait for its place.
    pub newcomer_grace: Option<Duration>,
    /// Connections that are accepted a second.
    pub connects_per_second: Option<u32>,
    /// A client that is silent for so long is sent away.
    pub handshake_silence: Option<Duration>,
    /// One that has no export by then, too.
    pub handshake_timeout: Option<Duration>,
    /// Bytes of a client before it has TLS, where it must.
    pub handshake_bytes: Option<u64>,
}

/// Reads one of the times.
///
/// # Errors
/// Half a sentence that follows the text.
pub fn time(text: &str) -> Result<Duration, String> {
    times::within(text, TIMES)
}

/// Reads the bytes.
///
/// # Errors
/// Half a sentence that follows the text.
pub fn bytes(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text).map_err(|error| error.to_string())?;
    let (least, most) = BYTES;
    if (least..=most).contains(&bytes) {
        Ok(bytes)
    } else {
        Err(format!("must be {} to {}", size::exact(least), size::exact(most)))
    }
}

impl HandshakeWords {
    /// Takes one of its keys of a file.
    ///
    /// # Errors
    /// A sentence.
    pub fn take(&mut self, key: &str, value: &DeValue<'_>) -> Result<(), String> {
        if key == "max_newcomers" {
            self.max_newcomers = Some(within(key, value, MAX_NEWCOMERS_RANGE)?);
            return Ok(());
        }
        if key == "connects_per_second" {
            self.connects_per_second = Some(within(key, value, CONNECTS_RANGE)?);
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
        let of_key = |why: String| format!("{key}={text}: {why}");
        let place = match key {
            "handshake_bytes" => {
                self.handshake_bytes = Some(bytes(text).map_err(of_key)?);
                return Ok(());
            }
            "newcomer_grace" => &mut self.newcomer_grace,
            "handshake_silence" => &mut self.handshake_silence,
            _ => &mut self.handshake_timeout,
        };
        *place = Some(time(text).map_err(of_key)?);
        Ok(())
    }

    /// What these say, and of the rest what `others` say.
    #[must_use]
    pub fn or(&self, others: &Self) -> Self {
        Self {
            max_newcomers: self.max_newcomers.or(others.max_newcomers),
            newcomer_grace: self.newcomer_grace.or(others.newcomer_grace),
            connects_per_second: self.connects_per_second.or(others.connects_per_second),
            handshake_silence: self.handshake_silence.or(others.handshake_silence),
            handshake_timeout: self.handshake_timeout.or(others.handshake_timeout),
            handshake_bytes: self.handshake_bytes.or(others.handshake_bytes),
        }
    }
}
