//! Amount of work that randomised tests do.

use std::env;
use std::ops::Div;

/// Environment variable that selects the effort. The slow lane of `cargo xtask test` sets it to
/// `full`.
const VARIABLE: &str = "FREESTONE_EFFORT";

/// Returns `full` if the environment has `FREESTONE_EFFORT=full`, and `quick` otherwise.
///
/// Randomised tests call this function for their number of cases: a few for every change, all in
/// the slow lane.
pub fn effort<T>(quick: T, full: T) -> T {
    if env::var_os(VARIABLE).is_some_and(|value| value == "full") { full } else { quick }
}

/// Returns a tenth of `full`, or `full` itself in the slow lane: see [`effort`].
pub fn scaled<T: Copy + Div<Output = T> + From<u8>>(full: T) -> T {
    effort(full / T::from(10), full)
}
