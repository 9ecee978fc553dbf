//! Synchronisation on the path of requests: pins, the lock bit in a word with its waiters, and state of each CPU.
//!
//! Every room above may use these modules; they know no device. A pinned thread waits for lock bits only, and a
//! parking bucket is locked last ([`pin`], [`parking`]).

pub mod parking;
#[cfg(not(loom))]
pub mod per_cpu_arc;
#[cfg(not(loom))]
pub mod percpu;
pub mod pin;
pub mod word_lock;

#[cfg(loom)]
pub mod percpu {
    //! In a loom model there is one CPU.

    /// Returns the number of CPUs.
    pub const fn cpus() -> usize {
        1
    }
    /// Returns the number of the calling thread's CPU.
    pub const fn current() -> usize {
        0
    }
}
