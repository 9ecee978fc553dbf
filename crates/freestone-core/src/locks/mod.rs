//! Synchronisation on the path of requests: pins, the lock bit in a word with its waiters, and state of each CPU.
//!
//! Every room above may use these modules; they know no device. A pinned thread waits for lock bits only, and a
//! parking bucket is locked last ([`pin`], [`parking`]).

pub mod parking;
#[cfg(not(loom))]
pub mod per_cpu_arc;
pub mod percpu;
pub mod pin;
pub mod word_lock;
