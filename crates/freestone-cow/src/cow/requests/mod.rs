//! Requests in progress: reads and writes of a snapshot, writes of an origin, and the copies that these wait for.
//!
//! A request that has to wait is a job, which continues on the work queue of its origin. Only
//! [`devices`](super::devices) start requests. The [`state`](super::state) has the lock order.

mod copy;
pub(super) mod origin_write;
pub(super) mod reads;
pub(super) mod writes;
