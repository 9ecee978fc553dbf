//! The thread that reads requests of a connection or a queue: its memory budget, its helpers, its completions.
//!
//! Exports use these modules, and [`bytes`](crate::bytes) asks which requests are worth a helper. They use the
//! device interface and [`plug`](crate::plug).

#[cfg(not(loom))]
pub mod budget;
#[cfg(not(loom))]
pub mod completion_queue;
pub mod workers;
