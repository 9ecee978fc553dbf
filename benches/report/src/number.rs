//! Formatting of numbers for tables.

use std::fmt::Write as _;

use crate::{Row, Summary, Target, Unit, Verdict};

/// Formats a number with about three digits, and one more if it is near 1.
pub fn plain(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 2.0 => format!("{value:.2}"),
        _ if value.is_nan() => "?".into(),
        _ => format!("{value:.3}"),
    }
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Self::Ratio | Self::Points | Self::Count => "",
            Self::Seconds => " s",
            Self::Mib => " MiB",
            Self::Kib => " KiB",
            Self::Millis => " ms",
            Self::Micros => " us",
            Self::Nanos => " ns",
            Self::Iops => " IOPS",
            Self::Kiops => " k/s",
            Self::KbSecond => " KB/s",
            Self::Percent => " %",
        }
    }
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ahead => "ahead",
            Self::Level => "level",
            Self::Behind => "behind",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Median with quartiles; the verdict has a column of its own.
    Full,
    /// Median only, if there is one. A verdict "behind" is bold.
    Short,
}

/// Formats the measured value, or the reason why there is no median. A missed target is bold.
pub fn measured(row: &Row, style: Style) -> String {
    let Summary { median, quartile1: low, quartile3: high, count, .. } = row.value;
    let mut text = match (median.is_nan(), count) {
        (false, _) => plain(median) + row.unit.name(),
        (true, 0) => "absent".into(),
        (true, _) => "too wide a spread".into(),
    };
    if row.met == Some(false) || (style == Style::Short && row.verdict == Some(Verdict::Behind)) {
        text = format!("**{text}**");
    }
    let [low, high] = [low, high].map(plain);
    if (style == Style::Full || median.is_nan()) && count > 1 && low != high {
        let _ = write!(text, " ({low} - {high})");
    }
    text
}

/// Formats the target without trailing zeroes. Returns None if the row has no target.
pub fn target(row: &Row) -> Option<String> {
    let short = |value: f64| {
        if value.abs() >= 100.0 {
            format!("{value:.0}")
        } else {
            format!("{}", (value * 1000.0).round() / 1000.0)
        }
    };
    let text = match row.target? {
        Target::AtLeast(bound) => format!("at least {}", short(bound)),
        Target::AtMost(bound) => format!("at most {}", short(bound)),
        Target::Within(low, high) => format!("{} to {}", short(low), short(high)),
    };
    Some(text + row.unit.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_format_depends_on_magnitude() {
        let all =
            [(13583.4, "13583"), (24.94, "24.9"), (5.287, "5.29"), (1.0361, "1.036"), (-0.4564, "-0.456")];
        for (value, text) in all {
            assert_eq!(plain(value), text);
        }
        let of = |unit, bound| target(&Row::new("x", unit, Summary::one(1.0)).target(bound)).unwrap();
        assert_eq!(of(Unit::Ratio, Target::AtMost(1.15)), "at most 1.15");
        assert_eq!(of(Unit::Ratio, Target::Within(0.95, 1.05)), "0.95 to 1.05");
        assert_eq!(of(Unit::Kiops, Target::AtLeast(20_000.0)), "at least 20000 k/s");
    }

    #[test]
    fn withheld_median_shows_reason() {
        let value = Summary { quartile1: 1.0, quartile3: 3.0, count: 3, ..Summary::one(1.5) };
        let row = Row::new("x", Unit::Micros, value);
        assert_eq!(measured(&row, Style::Full), "1.500 us (1.000 - 3.00)");
        assert_eq!(measured(&row, Style::Short), "1.500 us");
        for style in [Style::Full, Style::Short] {
            assert_eq!(
                measured(&row.clone().withhold_if_unsteady(), style),
                "too wide a spread (1.000 - 3.00)"
            );
            assert_eq!(measured(&Row::absent("x", Unit::Ratio), style), "absent");
        }
    }
}
