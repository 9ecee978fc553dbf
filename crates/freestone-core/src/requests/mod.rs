//! Queues and gates of requests: modules that hold, order and batch requests, and continue them on another thread.
//!
//! The modules know neither the device interface nor the content of a request, so devices, rate limits and exports
//! all use them. They use [`pin`](crate::pin) and the system.

#[cfg(not(loom))]
pub mod concurrency_limit;
#[cfg(not(loom))]
pub mod consistency_group;
#[cfg(not(loom))]
pub mod freeze_gate;
pub mod held_requests;
#[cfg(not(loom))]
pub mod overlap;
#[cfg(not(loom))]
pub mod plug;
#[cfg(not(loom))]
pub mod timer;
#[cfg(not(loom))]
pub mod work_queue;

#[cfg(loom)]
pub mod plug {
    //! In a loom model no thread has a plug.

    /// Does nothing.
    pub const fn flush() {}
}
