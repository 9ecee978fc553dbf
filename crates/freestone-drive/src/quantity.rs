//! Parses and formats numbers with a unit, such as sizes and times from users. Callers turn the
//! errors into messages.

/// Units of sizes and their bytes, 1024-based, largest first.
pub const SIZES: [(&str, u64); 4] = [("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)];

/// Errors from parsing a number with a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParseError<'a> {
    /// The text does not start with a digit.
    NoNumber,
    /// The number has no unit. Contains the number.
    NoUnit(u64),
    /// The number, without its unit, exceeds 64 bits.
    TooLong,
    /// The text after the digits is not a known unit.
    Unit {
        /// Digits before the unit, as typed.
        digits: &'a str,
        /// Value of the digits, or `None` if it exceeds 64 bits.
        number: Option<u64>,
        /// Text after the digits, which is not a known unit.
        unit: &'a str,
    },
    /// The number multiplied by its unit exceeds 64 bits.
    Overflow,
}

/// Parses an integer followed by one of `units`, in upper or lower case, and returns their product.
/// The integer may be 0.
pub fn parse<'a>(text: &'a str, units: &[(&str, u64)]) -> Result<u64, ParseError<'a>> {
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    if digits.is_empty() {
        return Err(ParseError::NoNumber);
    }
    let number = digits.parse().ok();
    if unit.is_empty() {
        return Err(number.map_or(ParseError::TooLong, ParseError::NoUnit));
    }
    let factor = factor(unit, units).ok_or(ParseError::Unit { digits, number, unit })?;
    number.ok_or(ParseError::TooLong)?.checked_mul(factor).ok_or(ParseError::Overflow)
}

/// Returns the factor of `unit`, in upper or lower case, or `None` if it is not in `units`.
pub fn factor(unit: &str, units: &[(&str, u64)]) -> Option<u64> {
    units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|(_, factor)| *factor)
}

/// Returns `number` as a multiple of the largest unit that divides it, and the unit's name. Returns
/// `None` for 0 or if no unit divides it.
pub fn largest(number: u64, units: &[(&'static str, u64)]) -> Option<(u64, &'static str)> {
    let (name, factor) = units.iter().find(|(_, factor)| number != 0 && number.is_multiple_of(*factor))?;
    Some((number / factor, name))
}

#[cfg(test)]
mod tests {
    use super::{ParseError, SIZES, largest, parse};

    #[test]
    fn parse_requires_a_known_unit() {
        let long = "99999999999999999999";
        for (text, outcome) in [
            ("4k", Ok(4 << 10)),
            ("0G", Ok(0)),
            ("16777215T", Ok(16_777_215 << 40)),
            ("16777216T", Err(ParseError::Overflow)),
            ("", Err(ParseError::NoNumber)),
            ("G", Err(ParseError::NoNumber)),
            ("-1G", Err(ParseError::NoNumber)),
            ("7", Err(ParseError::NoUnit(7))),
            (long, Err(ParseError::TooLong)),
            ("99999999999999999999G", Err(ParseError::TooLong)),
            ("4 G", Err(ParseError::Unit { digits: "4", number: Some(4), unit: " G" })),
            ("99999999999999999999X", Err(ParseError::Unit { digits: long, number: None, unit: "X" })),
        ] {
            assert_eq!(parse(text, &SIZES), outcome, "{text}");
        }
    }

    #[test]
    fn largest_returns_unit_that_divides() {
        assert_eq!(largest(1536 << 20, &SIZES), Some((1536, "M")));
        assert_eq!((largest(0, &SIZES), largest(1536, &SIZES)), (None, None));
    }
}
