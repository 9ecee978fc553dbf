//! Counts, latencies, traces and rate limits of the requests of one access path to a device.
//!
//! [`Counting`] is the device that every export calls; the other modules belong to it. The room uses the device
//! interface and [`limits`](crate::limits); the interface re-exports the types of this room and uses none.

mod counter;
mod counting;
mod counts;
mod latency;
mod limiting;
mod probe;
mod request_trace;
mod sampling;
mod tally;

pub use counter::{Counter, PerCounter};
pub use counting::Counting;
pub use counts::{OpCounts, OpStats};
pub use latency::Latency;
pub use limiting::LimitSuspension;
pub use request_trace::{REQUEST_SPANS, span_requests};
pub use tally::{IoStats, StatSource, Sum, Tally};
