//! Numbers of a TOML file.

use std::ops::RangeInclusive;

use toml::de::DeValue;

/// A whole number, however it is written.
pub fn integer(value: &DeValue<'_>) -> Option<i64> {
    let number = value.as_integer()?;
    i64::from_str_radix(number.as_str(), number.radix()).ok()
}

/// A number in a range that a `u32` has. The error is a sentence.
pub fn within(key: &str, value: &DeValue<'_>, range: RangeInclusive<i64>) -> Result<u32, String> {
    let must = format!("must be a number from {} to {}", range.start(), range.end());
    let Some(number) = integer(value) else {
        return Err(format!("{key}: {must}, not {}", value.type_str()));
    };
    match u32::try_from(number) {
        Ok(fits) if range.contains(&number) => Ok(fits),
        _ => Err(format!("{key}={number}: {must}")),
    }
}
