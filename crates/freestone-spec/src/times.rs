//! Times as people write and read them.

use std::time::{Duration, SystemTime};

use freestone::quantity::{self, Wrong};

/// Units: name, milliseconds.
const UNITS: [(&str, u64); 4] = [("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];
const MAX: Duration = Duration::from_secs(7 * 86_400);

/// A whole number with a unit.
///
/// # Errors
/// Half a sentence.
pub fn parse(text: &str) -> Result<Duration, String> {
    match quantity::parse(text, &UNITS) {
        Ok(ms) if Duration::from_millis(ms) <= MAX => Ok(Duration::from_millis(ms)),
        Ok(_) | Err(Wrong::Overflow | Wrong::Long) => Err("at most 168h".into()),
        Err(Wrong::Bare(number)) => Err(format!("give a unit; {number}s?")),
        Err(Wrong::NoNumber | Wrong::Unit { .. }) => {
            Err("must be a whole number with ms, s, m or h, for example 10s".into())
        }
    }
}

/// The same, from the first to the second of these times.
///
/// # Errors
/// Half a sentence.
pub fn within(text: &str, (least, most): (Duration, Duration)) -> Result<Duration, String> {
    let time = parse(text)?;
    if (least..=most).contains(&time) {
        Ok(time)
    } else {
        Err(format!("must be {} to {}", exact(least), exact(most)))
    }
}

/// How long, as it is written.
pub fn exact(time: Duration) -> String {
    let ms = time.as_millis() as u64;
    let unit = UNITS.iter().find(|(_, unit)| ms > 0 && ms.is_multiple_of(*unit));
    unit.map_or_else(|| "0s".to_owned(), |(name, unit)| format!("{}{name}", ms / unit))
}

/// A moment, as of RFC 3339, in UTC.
pub fn shown(when: SystemTime) -> String {
    humantime::format_rfc3339_seconds(when).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        assert_eq!(parse("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(parse("0s"), Ok(Duration::ZERO));
        assert_eq!(parse("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(parse("10").unwrap_err(), "give a unit; 10s?");
        for bad in ["", "s", "1.5s", "169h", "99999999999999999999s"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        for text in ["10s", "0s", "2m", "168h", "1500ms"] {
            assert_eq!(exact(parse(text).unwrap()), text);
        }
    }

    #[test]
    fn moments_are_of_utc() {
        let when = SystemTime::UNIX_EPOCH + Duration::from_secs(1_764_126_725);
        assert_eq!(shown(when), "2025-11-26T03:12:05Z");
    }
}
