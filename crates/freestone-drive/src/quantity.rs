//! Numbers with a unit, as people type and read them: sizes, times. What a wrong one is told is
//! said where it was typed.

/// Units of sizes, 1024-based, from large to small: letter, bytes.
pub const SIZES: [(&str, u64); 4] = [("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)];

/// Why a text is not a number with a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong<'a> {
    /// No digit is at its beginning.
    NoNumber,
    /// A number alone.
    Bare(u64),
    /// The number has more than 64 bits by itself.
    Long,
    /// Something that is none of the units.
    Unit {
        /// As it was typed.
        digits: &'a str,
        /// The same, where it has 64 bits at most.
        number: Option<u64>,
        /// What is behind the digits.
        unit: &'a str,
    },
    /// It has more than 64 bits with its unit.
    Overflow,
}

/// Parses a whole number with one of `units`, in large letters or small ones. It may be 0.
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

/// What a unit stands for.
pub fn factor(unit: &str, units: &[(&str, u64)]) -> Option<u64> {
    units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|(_, factor)| *factor)
}

/// The number in the largest of the units that divides it; `None` for 0, and where none does.
pub fn largest(number: u64, units: &[(&'static str, u64)]) -> Option<(u64, &'static str)> {
    let (name, factor) = units.iter().find(|(_, factor)| number != 0 && number.is_multiple_of(*factor))?;
    Some((number / factor, name))
}

#[cfg(test)]
mod tests {
    use super::{SIZES, Wrong, largest, parse};

    #[test]
    fn a_number_has_one_of_the_units() {
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
    fn the_largest_unit_divides() {
        assert_eq!(largest(1536 << 20, &SIZES), Some((1536, "M")));
        assert_eq!((largest(0, &SIZES), largest(1536, &SIZES)), (None, None));
    }
}
