//! Numbers as they stand in a table.

use super::run::{Summary, Target, Unit};

/// What stands for a median that is not given.
const WIDE: &str = "too wide a spread";

/// About three digits; one more where a ratio is near to 1.
pub fn plain(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 2.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// A number with its unit.
fn with_unit(unit: Unit, value: f64) -> String {
    plain(value) + name(unit)
}

/// What stands behind a number.
fn name(unit: Unit) -> &'static str {
    match unit {
        Unit::Ratio | Unit::Points | Unit::Count => "",
        Unit::Seconds => " s",
        Unit::Mib => " MiB",
        Unit::Kib => " KiB",
        Unit::Millis => " ms",
        Unit::Micros => " us",
        Unit::Nanos => " ns",
        Unit::Kiops => " k/s",
        Unit::Percent => " %",
    }
}

/// Median and quartiles.
pub fn spread(unit: Unit, value: &Summary) -> String {
    let quartiles = match (value.quartile1, value.quartile3) {
        (Some(low), Some(high)) if value.count > 1 && plain(low) != plain(high) => {
            format!(" ({} - {})", plain(low), plain(high))
        }
        _ => String::new(),
    };
    median(unit, value) + &quartiles
}

/// The median alone, or why there is none.
pub fn median(unit: Unit, value: &Summary) -> String {
    match value.median {
        Some(median) => with_unit(unit, median),
        None if value.count == 0 => "absent".into(),
        None => WIDE.into(),
    }
}

/// What a number is to reach.
pub fn target(unit: Unit, target: Target) -> String {
    let text = match target {
        Target::AtLeast(bound) => format!("at least {}", short(bound)),
        Target::AtMost(bound) => format!("at most {}", short(bound)),
        Target::Within(low, high) => format!("{} to {}", short(low), short(high)),
    };
    text + name(unit)
}

/// A bound, without zeroes that say nothing.
fn short(value: f64) -> String {
    if value.abs() >= 100.0 {
        format!("{value:.0}")
    } else {
        format!("{}", (value * 1000.0).round() / 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_fit_the_size() {
        let all =
            [(13583.4, "13583"), (24.94, "24.9"), (5.287, "5.29"), (1.0361, "1.036"), (-0.4564, "-0.456")];
        for (value, text) in all {
            assert_eq!(plain(value), text);
        }
        assert_eq!(target(Unit::Ratio, Target::AtMost(1.15)), "at most 1.15");
        assert_eq!(target(Unit::Ratio, Target::Within(0.95, 1.05)), "0.95 to 1.05");
        assert_eq!(target(Unit::Kiops, Target::AtLeast(20_000.0)), "at least 20000 k/s");
    }

    #[test]
    fn a_median_that_is_not_given_is_not_made_up() {
        let mut value = Summary { median: Some(1.5), quartile1: Some(1.0), quartile3: Some(3.0), count: 3 };
        assert_eq!(spread(Unit::Micros, &value), "1.500 us (1.000 - 3.00)");
        value.median = None;
        assert_eq!(spread(Unit::Micros, &value), "too wide a spread (1.000 - 3.00)");
        let absent = Summary { median: None, quartile1: None, quartile3: None, count: 0 };
        assert_eq!(spread(Unit::Ratio, &absent), "absent");
    }
}
