//! Parses and formats times, such as `10s`.

use std::time::{Duration, SystemTime};

use freestone::quantity::{self, ParseError};

/// Units of times: name and number of milliseconds.
const UNITS: [(&str, u64); 4] = [("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];
const MAX: Duration = Duration::from_secs(7 * 86_400);
/// Units of ages: name and number of seconds.
const AGE_UNITS: [(&str, u64); 5] = [("w", 7 * DAY), ("d", DAY), ("h", 3600), ("m", 60), ("s", 1)];
/// Largest age in days: a hundred years.
const AGE_DAYS_MAX: u64 = 36_500;
const DAY: u64 = 86_400;

/// Parses a time: a whole number with a unit, such as `10s` or `1500ms`.
///
/// # Errors
/// Returns the reason, which the caller puts after `KEY=TEXT: `.
pub fn parse(text: &str) -> Result<Duration, String> {
    match quantity::parse(text, &UNITS) {
        Ok(ms) if Duration::from_millis(ms) <= MAX => Ok(Duration::from_millis(ms)),
        Ok(_) | Err(ParseError::Overflow | ParseError::TooLong) => Err("at most 168h".into()),
        Err(ParseError::NoUnit(number)) => Err(format!("give a unit; {number}s?")),
        Err(ParseError::NoNumber | ParseError::Unit { .. }) => {
            Err("must be a whole number with ms, s, m or h, for example 10s".into())
        }
    }
}

/// Parses a time within the given range, both ends included.
///
/// # Errors
/// Returns the reason, which the caller puts after `KEY=TEXT: `.
pub fn parse_in_range(text: &str, (least, most): (Duration, Duration)) -> Result<Duration, String> {
    let time = parse(text)?;
    if (least..=most).contains(&time) {
        Ok(time)
    } else {
        Err(format!("must be {} to {}", exact(least), exact(most)))
    }
}

/// Parses a maximum age, such as `30d`: a whole number with a unit, at least one second.
///
/// # Errors
/// Returns the reason, which the caller puts after `KEY=TEXT: `.
pub fn parse_age(text: &str) -> Result<Duration, String> {
    match quantity::parse(text, &AGE_UNITS) {
        Ok(0) => Err("must be at least 1s".into()),
        Ok(secs) if secs <= AGE_DAYS_MAX * DAY => Ok(Duration::from_secs(secs)),
        Ok(_) | Err(ParseError::Overflow | ParseError::TooLong) => Err(format!("at most {AGE_DAYS_MAX}d")),
        Err(ParseError::NoUnit(number)) => Err(format!("give a unit; {number}d?")),
        Err(ParseError::NoNumber | ParseError::Unit { .. }) => {
            Err("must be a whole number with s, m, h, d or w, for example 30d".into())
        }
    }
}

/// Formats a time in the form that [`parse`] accepts.
pub fn exact(time: Duration) -> String {
    let ms = time.as_millis() as u64;
    let unit = UNITS.iter().find(|(_, unit)| ms > 0 && ms.is_multiple_of(*unit));
    unit.map_or_else(|| "0s".to_owned(), |(name, unit)| format!("{}{name}", ms / unit))
}

/// Formats a date and time in UTC with seconds, as in RFC 3339.
pub fn format_utc(when: SystemTime) -> String {
    humantime::format_rfc3339_seconds(when).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_with_unit_parse() {
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
    fn ages_up_to_a_hundred_years_parse() {
        for (text, secs) in [("12h", 43_200), ("30d", 30 * DAY), ("2w", 14 * DAY), ("36500d", 36_500 * DAY)] {
            assert_eq!(parse_age(text), Ok(Duration::from_secs(secs)), "{text}");
        }
        assert_eq!(parse_age("30").unwrap_err(), "give a unit; 30d?");
        assert_eq!(parse_age("0d").unwrap_err(), "must be at least 1s");
        for bad in ["", "d", "1.5d", "-1d", "36501d", "1y", "99999999999999999999d"] {
            assert!(parse_age(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn shown_date_is_in_utc() {
        let when = SystemTime::UNIX_EPOCH + Duration::from_secs(1_764_126_725);
        assert_eq!(format_utc(when), "2025-11-26T03:12:05Z");
    }
}
