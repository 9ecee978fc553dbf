//! The five experiments, a module for each. An experiment measures, asks the model, and returns tables.

pub mod locks;
pub mod snapshots;
pub mod streams;
pub mod writeback;
pub mod zones;

use std::time::Duration;

use freestone_benches::measure::Slices;
use freestone_benches::options::Options;

/// Minimum number of rounds for a meaningful spread.
const ROUNDS_MIN: u32 = 3;
const QUICK_SLICE_MS: u32 = 10;

/// Returns number and length of slices, from the command line or the defaults of the experiment.
fn slices(options: &Options, rounds: u32, slice_ms: u32) -> Slices {
    let (rounds, slice_ms) = if options.quick { (ROUNDS_MIN, QUICK_SLICE_MS) } else { (rounds, slice_ms) };
    Slices {
        pairs: options.pairs.unwrap_or(rounds),
        slice: Duration::from_millis(u64::from(options.slice_ms.unwrap_or(slice_ms))),
    }
}
