//! Rate limits: requests and bytes per second. Requests beyond the rate wait in order.
//!
//! A [`Limiter`] has a FIFO queue of waiting requests, and token buckets from which the requests pay. A
//! request pays its whole cost before it continues, in parts if necessary: a request larger than the burst
//! waits longer and is not refused. No thread waits: a timer for each queue wakes one common thread, which
//! continues the requests that have paid.
//!
//! While a device has limits, requests are not tried, because a try that completes only a part of a request
//! would have to pay for this part. So all requests are submitted and pay in one place
//! ([`Counting`](crate::device::Counting)). A limit never fails a request. At the end of a server the limits
//! are lifted, so that waiting requests run.

#[cfg(all(loom, test))]
mod models;
mod paced_queue;
#[cfg(not(loom))]
mod rate;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(not(loom))]
pub use limiter::{Limiter, RejectGuard, SuspendGuard};
pub use paced_queue::{Cost, PacedRequest};
#[cfg(not(loom))]
pub use rate::{
    BURST_BYTES_MIN, BURST_PART, BYTES_PER_SECOND_MAX, BYTES_PER_SECOND_MIN, Limits, OPERATIONS_MAX,
};

#[cfg(not(loom))]
mod limiter;
