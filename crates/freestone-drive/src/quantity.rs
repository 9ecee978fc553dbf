//! Numbers with a unit: sizes and times as users type them. Callers produce the error messages.

/// Units of sizes with their bytes, 1024-based, largest first.
pub const SIZES: [(&str, u64); 4] = [("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)];

/// Errors from parsing a number with a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong<'a> {
    /// The text does not start with a digit.
    NoNumber,
    /// The number has no unit.
    Bare(u64),
    /// The number itself exceeds 64 bits.
    Long,
    /// The unit is unknown.
    Unit {
        /// Digits as typed.
        digits: &'a str,
        /// Value of the digits, if it fits 64 bits.
        number: Option<u64>,
        /// Text after the digits.
        unit: &'a str,
    },
    /// The number multiplied by its unit exceeds 64 bits.
    Overflow,
}

/// Parses an integer with one of `units`, in upper or lower case. The integer may be 0.
pub fn parse<'a>(text: &'a str, units: &[(&str, u64)]) -> Result<u64, Wrong<'a>> {
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    if digits.is_empty() {
        return Err(Wrong::NoNumber);
    }
    let number = digits.parse().ok();
    if unit.is_empty() {
        return Err(number.map_or(Wrong::Long, Wrong::Bare));
    }
    let factor = factor(unit, units).ok_or(Wrong::Unit { digits, number, unit })?;
    number.ok_or(Wrong::Long)?.checked_mul(factor).ok_or(Wrong::Overflow)
}

/// Returns the factor of a unit, in upper or lower case.
pub fn factor(unit: &str, units: &[(&str, u64)]) -> Option<u64> {
    units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|(_, factor)| *factor)
}

/// Returns `number` in the largest unit that divides it, or `None` for 0 and if no unit divides it.
pub fn largest(number: u64, units: &[(&'static str, u64)]) -> Option<(u64, &'static str)> {
    let (name, factor) = units.iter().find(|(_, factor)| number != 0 && number.is_multiple_of(*factor))?;
    Some((number / factor, name))
}

#[cfg(test)]
mod tests {
    use super::{SIZES, Wrong, largest, parse};

    #[test]
    fn parse_requires_a_known_unit() {
        let long = "99999999999999999999";
        for (text, outcome) in [
            ("4k", Ok(4 << 10)),
            ("0G", Ok(0)),
            ("16777215T", Ok(16_777_215 << 40)),
            ("16777216T", Err(Wrong::Overflow)),
            ("", Err(Wrong::NoNumber)),
            ("G", Err(Wrong::NoNumber)),
            ("-1G", Err(Wrong::NoNumber)),
            ("7", Err(Wrong::Bare(7))),
            (long, Err(Wrong::Long)),
            ("99999999999999999999G", Err(Wrong::Long)),
            ("4 G", Err(Wrong::Unit { digits: "4", number: Some(4), unit: " G" })),
            ("99999999999999999999X", Err(Wrong::Unit { digits: long, number: None, unit: "X" })),
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
