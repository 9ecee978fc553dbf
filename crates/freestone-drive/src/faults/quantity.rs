//! Parses and formats sizes, times, probabilities and counts in fault rules.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use super::rules::{Chance, DELAY_SECONDS_MAX, NTH_MAX, Range};
use crate::quantity::{self, ParseError};

/// Units of sizes in rules with their bytes, including `B` for bytes, largest first.
const SIZES: [(&str, u64); 5] = {
    let [t, g, m, k] = quantity::SIZES;
    [t, g, m, k, ("B", 1)]
};
/// Units of times in rules with their nanoseconds, largest first.
const TIMES: [(&str, u64); 4] = [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1000), ("ns", 1)];
const DELAY_NANOS_MAX: u64 = DELAY_SECONDS_MAX * 1_000_000_000;
/// Maximum number of decimal places of a probability in a rule.
const FRACTION_DIGITS_MAX: usize = 9;

/// Errors from parsing a value in a rule. Messages are printed after `KEY=VALUE: `.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "each variant's message is its documentation")]
pub enum QuantityError {
    #[error("a range is OFFSET+LENGTH, as in 1M+64K")]
    Range,
    #[error("\"{0}\" has no unit; give one of K, M, G, T (1024-based) or B for bytes, as in {0}B or {0}M")]
    BareSize(String),
    #[error(
        "\"{0}\" is not a size; give a whole number with K, M, G, T (1024-based) or B for bytes, as in 64K"
    )]
    Size(String),
    #[error("the length must be more than 0")]
    NoLength,
    #[error("the range exceeds the largest device")]
    TooFar,
    #[error("\"{0}\" has no unit; give one of ns, us, ms, s, as in {0}ms")]
    BareTime(String),
    #[error("\"{0}\" is not a time; give a whole number with ns, us, ms or s, as in 20ms")]
    Time(String),
    #[error("a delay is more than 0 and at most {DELAY_SECONDS_MAX}s")]
    Delay,
    #[error("a chance is more than 0 and at most 1, as in 1%, 1/1000 or 0.01")]
    Chance,
    #[error("does that mean {0}% or {0}/1000? Give 1%, 1/1000 or 0.01")]
    BareChance(String),
    #[error("at most {FRACTION_DIGITS_MAX} decimal places")]
    Digits,
    #[error("give a whole number from 1 to {NTH_MAX}")]
    Nth,
    #[error("give a whole number of at least 1")]
    Count,
}

/// Parses a byte range `OFFSET+LENGTH`, such as `1M+64K`.
pub(super) fn range(text: &str) -> Result<Range, QuantityError> {
    let (offset, len) = text.split_once('+').ok_or(QuantityError::Range)?;
    let (offset, len) = (size(offset)?, size(len)?);
    if len == 0 {
        return Err(QuantityError::NoLength);
    }
    // The end of a range must fit a signed 64-bit file offset.
    let end = offset.checked_add(len).filter(|&end| i64::try_from(end).is_ok());
    end.map(|_| Range { offset, len }).ok_or(QuantityError::TooFar)
}

fn size(text: &str) -> Result<u64, QuantityError> {
    match quantity::parse(text, &SIZES) {
        Ok(bytes) => Ok(bytes),
        Err(ParseError::NoUnit(0)) => Ok(0),
        Err(ParseError::NoUnit(_)) => Err(QuantityError::BareSize(text.into())),
        Err(ParseError::Overflow) => Err(QuantityError::TooFar),
        Err(ParseError::NoNumber | ParseError::TooLong | ParseError::Unit { .. }) => {
            Err(QuantityError::Size(text.into()))
        }
    }
}

/// Parses a delay such as `20ms`: more than 0, at most [`DELAY_SECONDS_MAX`].
pub(super) fn delay(text: &str) -> Result<Duration, QuantityError> {
    match quantity::parse(text, &TIMES) {
        Ok(nanos) if (1..=DELAY_NANOS_MAX).contains(&nanos) => Ok(Duration::from_nanos(nanos)),
        Ok(_) | Err(ParseError::Overflow) => Err(QuantityError::Delay),
        Err(ParseError::NoUnit(_)) => Err(QuantityError::BareTime(text.into())),
        Err(ParseError::NoNumber | ParseError::TooLong | ParseError::Unit { .. }) => {
            Err(QuantityError::Time(text.into()))
        }
    }
}

/// Parses a probability such as `1%`, `0.5%`, `1/1000` or `0.01`.
pub(super) fn chance(text: &str) -> Result<Chance, QuantityError> {
    if let Some((count, of)) = text.split_once('/') {
        let number =
            |text: &str| text.parse().ok().filter(|_| text.starts_with(|c: char| c.is_ascii_digit()));
        let (count, of) = number(count).zip(number(of)).ok_or(QuantityError::Chance)?;
        return Chance::new(count, of).ok_or(QuantityError::Chance);
    }
    if let Some(percent) = text.strip_suffix('%') {
        let (count, of) = decimal(percent)?;
        return Chance::new(count, of * 100).ok_or(QuantityError::Chance);
    }
    let (count, of) = decimal(text)?;
    if !text.contains('.') {
        return Err(QuantityError::BareChance(text.into()));
    }
    Chance::new(count, of).ok_or(QuantityError::Chance)
}

/// Parses a decimal number as numerator and denominator: `12.5` returns (125, 10).
fn decimal(text: &str) -> Result<(u64, u64), QuantityError> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    // More than 4 integer digits exceed any probability, also in percent.
    if (whole.is_empty() && part.is_empty()) || whole.len() > 4 || !are_digits(whole) || !are_digits(part) {
        return Err(QuantityError::Chance);
    }
    if part.len() > FRACTION_DIGITS_MAX {
        return Err(QuantityError::Digits);
    }
    let of = 10_u64.pow(part.len() as u32);
    let number = |text: &str| if text.is_empty() { Ok(0) } else { text.parse::<u64>() };
    let (whole, part) = number(whole).and_then(|whole| Ok((whole, number(part)?))).unwrap_or_default();
    Ok((whole * of + part, of))
}

/// Parses the value of `nth`: a number from 1 to [`NTH_MAX`].
pub(super) fn nth(text: &str) -> Result<u64, QuantityError> {
    count(text).ok().filter(|&nth| nth <= NTH_MAX).ok_or(QuantityError::Nth)
}

/// Parses the value of `times` or `after`: a number of at least 1.
pub(super) fn count(text: &str) -> Result<u64, QuantityError> {
    let number = text.parse().ok().filter(|&number| number > 0 && !text.starts_with('+'));
    number.ok_or(QuantityError::Count)
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_size(self.offset, f)?;
        f.write_str("+")?;
        write_size(self.len, f)
    }
}

fn write_size(bytes: u64, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match quantity::largest(bytes, &SIZES) {
        Some((number, unit)) => write!(f, "{number}{unit}"),
        None => f.write_str("0"),
    }
}

/// Formats a delay in the largest unit that divides it.
pub(super) fn write_delay(delay: Duration, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let nanos = delay.as_nanos() as u64;
    // A rule's delay is never 0, so a unit is always found.
    let (number, unit) = quantity::largest(nanos, &TIMES).unwrap_or((nanos, "ns"));
    write!(f, "{number}{unit}")
}

impl fmt::Display for Chance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match 100 % self.of {
            0 => write!(f, "{}%", self.count * (100 / self.of)),
            _ => write!(f, "{}/{}", self.count, self.of),
        }
    }
}
