//! Sizes as a user types and reads them: a whole number with K, M, G or T, 1024-based.

use freestone::quantity::{self, SIZES, Wrong};
use thiserror::Error;

/// A bare number from here on is taken for a number of bytes when a suggestion is made, below it
/// for MiB.
const LOOKS_LIKE_BYTES: u64 = 1 << 20;

/// Why a text is not a size. Each is half a sentence that follows `key=value: `.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SizeError {
    /// Nothing there.
    #[error("a size is missing; give a whole number with K, M, G or T (1024-based), for example 512M")]
    Empty,
    /// A number alone: the kernel's interfaces mean bytes here, MiB there and sectors elsewhere.
    #[error("give a unit; {0}? (K, M, G and T are known, 1024-based)")]
    Bare(String),
    /// Digits after a point.
    #[error("a size is a whole number{}", maybe(.0.as_deref()))]
    Fraction(Option<String>),
    /// A unit that is not one of ours.
    #[error("unknown unit {unit:?}{}; K, M, G and T are known (1024-based)", maybe(.hint.as_deref()))]
    Unit {
        /// What stood there.
        unit: String,
        /// What was probably meant.
        hint: Option<String>,
    },
    /// Not a number at all.
    #[error("not a size; give a whole number with K, M, G or T (1024-based), for example 512M")]
    NotANumber,
    /// Zero, where something is needed.
    #[error("must be more than 0")]
    Zero,
    /// More than 64 bits.
    #[error("too large; the largest size that can be written is 16777215T")]
    Overflow,
}

fn maybe(text: Option<&str>) -> String {
    text.map(|t| format!("; {t}?")).unwrap_or_default()
}

/// Parses a size of at least one unit, in bytes.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    match quantity::parse(text, &SIZES) {
        Ok(0) | Err(Wrong::Bare(0)) => Err(SizeError::Zero),
        Ok(bytes) => Ok(bytes),
        Err(Wrong::NoNumber) if text.is_empty() => Err(SizeError::Empty),
        Err(Wrong::NoNumber) => Err(SizeError::NotANumber),
        Err(Wrong::Bare(number)) => Err(meant(number).map_or(SizeError::Overflow, SizeError::Bare)),
        Err(Wrong::Unit { digits, number, unit }) => Err(match unit.strip_prefix(['.', ',']) {
            Some(fraction) => SizeError::Fraction(whole(digits, fraction)),
            None if number.is_none() => SizeError::Overflow,
            None => SizeError::Unit { unit: unit.into(), hint: nearby(digits, unit) },
        }),
        Err(Wrong::Long | Wrong::Overflow) => Err(SizeError::Overflow),
    }
}

/// What a bare number was probably meant to be.
fn meant(number: u64) -> Option<String> {
    if number < LOOKS_LIKE_BYTES {
        return Some(format!("{number}M"));
    }
    // Rounded up to whole KiB, as the kernel rounds up to pages.
    number.div_ceil(1024).checked_mul(1024).map(exact)
}

/// `4GiB` and `4GB` are 4G.
fn nearby(digits: &str, unit: &str) -> Option<String> {
    let upper = unit.to_ascii_uppercase();
    let letter = upper.strip_suffix("IB").or_else(|| upper.strip_suffix('B'))?;
    quantity::factor(letter, &SIZES).map(|_| format!("{digits}{letter}"))
}

/// 1.5G is 1536M: the same size in a smaller unit, where there is one.
fn whole(digits: &str, fraction: &str) -> Option<String> {
    let (tail, unit) = fraction.split_at(fraction.find(|c: char| !c.is_ascii_digit())?);
    let factor = u128::from(quantity::factor(unit, &SIZES)?);
    // Longer numbers are nobody's size.
    if digits.len() > 6 || tail.is_empty() || tail.len() > 9 {
        return None;
    }
    let parts = 10_u128.pow(tail.len() as u32);
    let number = digits.parse::<u128>().ok()? * parts + tail.parse::<u128>().ok()?;
    let bytes = u64::try_from(number * factor / parts).ok()?;
    (bytes != 0 && bytes.is_multiple_of(1024)).then(|| exact(bytes))
}

/// A size as it can be typed again: the largest unit that divides it, else bytes with a `B`.
pub fn exact(bytes: u64) -> String {
    match quantity::largest(bytes, &SIZES) {
        Some((number, letter)) => format!("{number}{letter}"),
        None => format!("{bytes}B"),
    }
}

/// A size for people, as zramctl shows it: at most one decimal, `1.2G`, `512M`, `74B`.
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
    fn sizes_are_parsed() {
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
    fn what_is_not_a_size_is_refused_with_a_suggestion() {
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
    fn sizes_are_written() {
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
