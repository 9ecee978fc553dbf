//! How many requests a second, and how many of their bytes, get through: who comes too early waits
//! for its turn.
//!
//! A [`Limiter`] has a line of those that wait, in the order in which they came, and the rates that
//! they pay by. A request pays all that it costs before it goes on, if need be piece by piece: so one
//! that costs more than a whole burst waits longer, and is not refused. Nobody waits on a thread: one
//! timer for each line wakes the thread of all lines, which carries on those whose turn has come.

mod line;
#[cfg(all(loom, test))]
mod models;
#[cfg(not(loom))]
mod rate;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(not(loom))]
pub use limiter::{Ended, Lifted, Limiter};
pub use line::{Cost, Waits};
#[cfg(not(loom))]
pub use rate::{
    BURST_BYTES_MIN, BURST_PART, BYTES_PER_SECOND_MAX, BYTES_PER_SECOND_MIN, Limits, OPERATIONS_MAX,
};

#[cfg(not(loom))]
mod limiter;
