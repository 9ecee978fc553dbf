//! Parses numbers in TOML files.

use std::ops::RangeInclusive;

use toml::de::DeValue;

/// Returns the value of a TOML integer in any notation, or `None` if it is not an integer of 64
/// bits.
pub fn integer(value: &DeValue<'_>) -> Option<i64> {
    let number = value.as_integer()?;
    i64::from_str_radix(number.as_str(), number.radix()).ok()
}

/// Parses a TOML integer within `range`. The error message names the key and the range.
pub fn parse_in_range(key: &str, value: &DeValue<'_>, range: RangeInclusive<i64>) -> Result<u32, String> {
    let must = format!("must be a number from {} to {}", range.start(), range.end());
    let Some(number) = integer(value) else {
        return Err(format!("{key}: {must}, not {}", value.type_str()));
    };
    match u32::try_from(number) {
        Ok(fits) if range.contains(&number) => Ok(fits),
        _ => Err(format!("{key}={number}: {must}")),
    }
}
