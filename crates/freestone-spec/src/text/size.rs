//! Parses and formats sizes: whole numbers with K, M, G or T, 1024-based.

use freestone::quantity::{self, ParseError, SIZES};
use thiserror::Error;

/// Smallest number without a unit that a suggestion interprets as bytes. Smaller ones are
/// interpreted as MiB.
const LOOKS_LIKE_BYTES: u64 = 1 << 20;

/// Errors from parsing a size. Messages are printed after `key=value: `.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SizeError {
    /// The text is empty.
    #[error("a size is missing; give a whole number with K, M, G or T (1024-based), for example 512M")]
    Empty,
    /// The number has no unit, so it is ambiguous: kernel interfaces use bytes, MiB or sectors.
    /// Contains a suggestion.
    #[error("give a unit; {0}? (K, M, G and T are known, 1024-based)")]
    Bare(String),
    /// The number has a fraction. Contains a suggestion, if there is one.
    #[error("a size is a whole number{}", suggestion(.0.as_deref()))]
    Fraction(Option<String>),
    /// The unit is unknown.
    #[error("unknown unit {unit:?}{}; K, M, G and T are known (1024-based)", suggestion(.hint.as_deref()))]
    Unit {
        /// Text after the number, which is not a known unit.
        unit: String,
        /// Suggested size, if there is one.
        hint: Option<String>,
    },
    /// The text does not start with a number.
    #[error("not a size; give a whole number with K, M, G or T (1024-based), for example 512M")]
    NotANumber,
    /// The size is zero.
    #[error("must be more than 0")]
    Zero,
    /// The size in bytes does not fit in 64 bits.
    #[error("too large; the largest size that can be written is 16777215T")]
    Overflow,
}

fn suggestion(text: Option<&str>) -> String {
    text.map(|t| format!("; {t}?")).unwrap_or_default()
}

/// Parses a size greater than zero, such as `4G`, and returns it in bytes.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    match quantity::parse(text, &SIZES) {
        Ok(0) | Err(ParseError::NoUnit(0)) => Err(SizeError::Zero),
        Ok(bytes) => Ok(bytes),
        Err(ParseError::NoNumber) if text.is_empty() => Err(SizeError::Empty),
        Err(ParseError::NoNumber) => Err(SizeError::NotANumber),
        Err(ParseError::NoUnit(number)) => {
            Err(suggested_size(number).map_or(SizeError::Overflow, SizeError::Bare))
        }
        Err(ParseError::Unit { digits, number, unit }) => Err(match unit.strip_prefix(['.', ',']) {
            Some(fraction) => SizeError::Fraction(as_whole_number(digits, fraction)),
            None if number.is_none() => SizeError::Overflow,
            None => SizeError::Unit { unit: unit.into(), hint: suggested_unit(digits, unit) },
        }),
        Err(ParseError::TooLong | ParseError::Overflow) => Err(SizeError::Overflow),
    }
}

/// Returns a suggested size for a number without a unit, or `None` if it is too large.
fn suggested_size(number: u64) -> Option<String> {
    if number < LOOKS_LIKE_BYTES {
        return Some(format!("{number}M"));
    }
    // The number is rounded up to whole KiB, like sizes in the kernel to pages.
    number.div_ceil(1024).checked_mul(1024).map(exact)
}

/// Returns a suggested size for a similar unit, such as 4G for `4GiB` and `4GB`, or `None`.
fn suggested_unit(digits: &str, unit: &str) -> Option<String> {
    let upper = unit.to_ascii_uppercase();
    let letter = upper.strip_suffix("IB").or_else(|| upper.strip_suffix('B'))?;
    quantity::factor(letter, &SIZES).map(|_| format!("{digits}{letter}"))
}

/// Returns the same size as a whole number of a smaller unit, such as 1536M for 1.5G, or `None` if
/// there is none.
fn as_whole_number(digits: &str, fraction: &str) -> Option<String> {
    let (tail, unit) = fraction.split_at(fraction.find(|c: char| !c.is_ascii_digit())?);
    let factor = u128::from(quantity::factor(unit, &SIZES)?);
    // Longer numbers are not plausible sizes, and the multiplication could overflow.
    if digits.len() > 6 || tail.is_empty() || tail.len() > 9 {
        return None;
    }
    let parts = 10_u128.pow(tail.len() as u32);
    let number = digits.parse::<u128>().ok()? * parts + tail.parse::<u128>().ok()?;
    let bytes = u64::try_from(number * factor / parts).ok()?;
    (bytes != 0 && bytes.is_multiple_of(1024)).then(|| exact(bytes))
}

/// Formats a size exactly: in the largest unit that divides it, else in bytes with a `B`.
pub fn exact(bytes: u64) -> String {
    match quantity::largest(bytes, &SIZES) {
        Some((number, letter)) => format!("{number}{letter}"),
        None => format!("{bytes}B"),
    }
}

/// Formats a size for people, like zramctl, with at most one decimal, rounded down: `1.2G`, `512M`,
/// `74B`.
pub fn human(bytes: u64) -> String {
    let Some((letter, n)) = SIZES.iter().find(|(_, n)| bytes >= *n) else {
        return format!("{bytes}B");
    };
    let tenths = u128::from(bytes) * 10 / u128::from(*n);
    match tenths % 10 {
        0 => format!("{}{letter}", tenths / 10),
        rest => format!("{}.{rest}{letter}", tenths / 10),
    }
}

#[cfg(test)]
mod tests {
    use super::{exact, human, parse};

    #[test]
    fn sizes_with_units_parse() {
        for (text, bytes) in [
            ("1K", 1 << 10),
            ("4k", 4 << 10),
            ("512M", 512 << 20),
            ("512m", 512 << 20),
            ("4G", 4 << 30),
            ("0004g", 4 << 30),
            ("3T", 3 << 40),
            ("16777215T", 16777215 << 40),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_refused_with_suggestions() {
        let units = "K, M, G and T are known";
        for (text, sentence) in [
            (
                "",
                "a size is missing; give a whole number with K, M, G or T (1024-based), for example 512M"
                    .into(),
            ),
            ("1024", format!("give a unit; 1024M? ({units}, 1024-based)")),
            ("1073741824", format!("give a unit; 1G? ({units}, 1024-based)")),
            ("1500000", format!("give a unit; 1465K? ({units}, 1024-based)")),
            ("18446744073709551615", "too large; the largest size that can be written is 16777215T".into()),
            ("1.5G", "a size is a whole number; 1536M?".into()),
            ("0.5k", "a size is a whole number".into()),
            ("1.G", "a size is a whole number".into()),
            ("1.5", "a size is a whole number".into()),
            ("4GiB", format!("unknown unit \"GiB\"; 4G?; {units} (1024-based)")),
            ("4mb", format!("unknown unit \"mb\"; 4M?; {units} (1024-based)")),
            ("4X", format!("unknown unit \"X\"; {units} (1024-based)")),
            ("4 G", format!("unknown unit \" G\"; {units} (1024-based)")),
            (
                "-1G",
                "not a size; give a whole number with K, M, G or T (1024-based), for example 512M".into(),
            ),
            ("G", "not a size; give a whole number with K, M, G or T (1024-based), for example 512M".into()),
            ("0", "must be more than 0".into()),
            ("0G", "must be more than 0".into()),
            ("16777216T", "too large; the largest size that can be written is 16777215T".into()),
            ("99999999999999999999G", "too large; the largest size that can be written is 16777215T".into()),
        ] {
            assert_eq!(parse(text).unwrap_err().to_string(), sentence, "{text}");
        }
    }

    #[test]
    fn sizes_are_formatted() {
        for (bytes, typed, read) in [
            (0, "0B", "0B"),
            (1023, "1023B", "1023B"),
            (1024, "1K", "1K"),
            (1536, "1536B", "1.5K"),
            (1536 << 20, "1536M", "1.5G"),
            ((1 << 30) - 1, "1073741823B", "1023.9M"),
            (3 << 40, "3T", "3T"),
        ] {
            assert_eq!((exact(bytes).as_str(), human(bytes).as_str()), (typed, read));
        }
    }
}
