//! Numbers in a TOML file.

use std::ops::RangeInclusive;

use toml::de::DeValue;

/// Returns a whole number, in any notation of TOML.
pub fn integer(value: &DeValue<'_>) -> Option<i64> {
    let number = value.as_integer()?;
    i64::from_str_radix(number.as_str(), number.radix()).ok()
}

/// Parses a number of a range within `u32`. The error names the key.
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
