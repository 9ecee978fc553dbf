//! What many numbers come to.

use serde::{Deserialize, Serialize};

/// The quartiles of a ratio may be apart by so much of the median; a ratio that is less sure is not
/// given.
const SPREAD_MAX: f64 = 0.25;
/// Fewer measurements have no spread that means anything.
const STEADY_COUNT_MIN: usize = 3;

/// What many numbers come to.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Summary {
    /// The one in the middle, or between the two that are.
    #[serde(deserialize_with = "crate::or_nan")]
    pub median: f64,
    /// A quarter is below.
    #[serde(deserialize_with = "crate::or_nan")]
    pub quartile1: f64,
    /// A quarter is above.
    #[serde(deserialize_with = "crate::or_nan")]
    pub quartile3: f64,
    /// The least.
    #[serde(deserialize_with = "crate::or_nan")]
    pub min: f64,
    /// The most.
    #[serde(deserialize_with = "crate::or_nan")]
    pub max: f64,
    /// How many there are.
    pub count: usize,
}

impl Summary {
    /// Of at least one number.
    pub fn of(numbers: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = numbers.into_iter().collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = |part: f64| {
            let place = part * (sorted.len().saturating_sub(1)) as f64;
            let (low, high) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
            low + (high - low) * place.fract()
        };
        Self {
            median: at(0.5),
            quartile1: at(0.25),
            quartile3: at(0.75),
            min: at(0.0),
            max: at(1.0),
            count: sorted.len(),
        }
    }

    /// One measurement.
    pub fn one(number: f64) -> Self {
        Self::of([number])
    }

    /// Of the quotients of numbers that were measured side by side.
    pub fn ratio(of: &[f64], to: &[f64]) -> Self {
        Self::of(of.iter().zip(to).map(|(of, to)| of / to))
    }

    /// Whether the numbers are close enough together for their median to be given.
    pub fn is_steady(&self) -> bool {
        let Self { median, quartile1, quartile3, count, .. } = *self;
        count >= STEADY_COUNT_MIN && quartile3 - quartile1 <= SPREAD_MAX * median.abs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_interpolate() {
        let s = Summary::of([4.0, 1.0, 3.0, 2.0, 5.0]);
        assert_eq!((s.min, s.quartile1, s.median, s.quartile3, s.max, s.count), (1.0, 2.0, 3.0, 4.0, 5.0, 5));
        assert!((Summary::of([1.0, 2.0]).median - 1.5).abs() < 1e-9);
        assert!((Summary::ratio(&[2.0, 9.0], &[1.0, 3.0]).max - 3.0).abs() < 1e-9);
    }
}
