//! Requests of a zoned device: reads, writes, zone operations and power cuts, and the queues of those that wait.
//!
//! Only the device ([`Zones`](super::Zones)) starts them. They change zones through the table and make the changes
//! durable; the lock order is stated at `Inner` and in `table`.

mod cut;
mod extents;
mod ops;
pub(super) mod queue;
mod read;
mod write;
