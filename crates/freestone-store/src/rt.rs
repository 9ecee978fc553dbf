//! Threads, locks, time and what is random; in a simulation all of it is the simulation's, so that a seed
//! is one run to the last step, and in a model loom's, which goes through every interleaving.

#[cfg(not(any(freestone_sim, loom)))]
pub use std::{sync, thread, time};

#[cfg(all(freestone_sim, not(loom)))]
pub use freestone_sim::{sync, thread, time};

#[cfg(loom)]
pub use loom::thread;
#[cfg(loom)]
pub use std::time;

#[cfg(freestone_sim)]
use freestone_core::unique;

use uuid::Uuid;

/// Bits that nobody else has.
pub fn unique_id() -> Uuid {
    #[cfg(freestone_sim)]
    return Uuid::from_u64_pair(unique::number(), unique::number());
    #[cfg(not(freestone_sim))]
    Uuid::new_v4()
}

/// Reads a clock of this host that also counts while it sleeps.
#[cfg(not(loom))]
pub fn uptime() -> time::Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    // Neither part is negative.
    time::Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// What time people have. In a simulation it stands still: who compares times does so by the store's clock.
pub fn time_of_day() -> time::SystemTime {
    #[cfg(freestone_sim)]
    return time::UNIX_EPOCH;
    #[cfg(not(freestone_sim))]
    time::SystemTime::now()
}

#[cfg(loom)]
pub mod sync {
    //! What is modelled.

    use std::time::Duration;

    pub use loom::sync::{Arc, Mutex, MutexGuard};
    use std::sync::LockResult;
    pub use std::sync::PoisonError;

    use loom::sync::atomic::{AtomicBool, Ordering};

    /// loom's never times out; this one does when the model says so.
    #[derive(Debug)]
    pub struct Condvar {
        inner: loom::sync::Condvar,
        is_late: AtomicBool,
    }

    /// Whether it did.
    pub struct WaitTimeoutResult(bool);

    impl WaitTimeoutResult {
        /// Whether the time was up.
        pub fn timed_out(&self) -> bool {
            self.0
        }
    }

    impl Condvar {
        /// Nobody waits.
        pub fn new() -> Self {
            Self { inner: loom::sync::Condvar::new(), is_late: AtomicBool::new(false) }
        }

        /// Wakes one.
        pub fn notify_one(&self) {
            self.inner.notify_one();
        }

        /// Wakes all.
        pub fn notify_all(&self) {
            self.inner.notify_all();
        }

        /// Waits until it is woken, or until the model says that the time is up.
        pub fn wait_timeout<'a, T>(
            &self,
            guard: MutexGuard<'a, T>,
            _: Duration,
        ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
            let guard = self.inner.wait(guard).unwrap_or_else(PoisonError::into_inner);
            Ok((guard, WaitTimeoutResult(self.is_late.load(Ordering::SeqCst))))
        }

        /// The time of all who wait is up.
        pub fn time_passes(&self) {
            self.is_late.store(true, Ordering::SeqCst);
            self.inner.notify_all();
        }
    }
}
