//! Threads, locks, time and random numbers for this crate.
//!
//! In a simulation, freestone-sim provides all of these, so one seed always gives the same run. In loom
//! models, loom provides threads and locks.

#[cfg(not(any(freestone_sim, loom)))]
pub use std::{sync, thread, time};

#[cfg(all(freestone_sim, not(loom)))]
pub use freestone_sim::{sync, thread, time};

#[cfg(loom)]
pub use loom::{sync, thread};
#[cfg(loom)]
pub use std::time;

#[cfg(freestone_sim)]
use freestone_core::unique;

use uuid::Uuid;

/// Returns a random UUID; in a simulation, a deterministic one.
pub fn unique_id() -> Uuid {
    #[cfg(freestone_sim)]
    return Uuid::from_u64_pair(unique::random_id(), unique::random_id());
    #[cfg(not(freestone_sim))]
    Uuid::new_v4()
}

/// Reads the boot-time clock of this host, which also counts during suspend.
#[cfg(not(loom))]
pub fn uptime() -> time::Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    // The boot-time clock starts at zero, so neither part is negative.
    time::Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Returns the wall-clock time. In a simulation this time is constant; code that compares times uses the
/// clock of the store.
pub fn time_of_day() -> time::SystemTime {
    #[cfg(freestone_sim)]
    return time::UNIX_EPOCH;
    #[cfg(not(freestone_sim))]
    time::SystemTime::now()
}

#[cfg(not(loom))]
pub use freestone_core::sync::Condvar;
#[cfg(loom)]
pub use models::Condvar;

#[cfg(loom)]
mod models {
    use std::time::Duration;

    use freestone_core::sync::{self, MutexGuard};
    use loom::sync::atomic::{AtomicBool, Ordering};

    /// Condition variable for loom models. Waits time out only after [`Condvar::expire_waits`].
    #[derive(Debug)]
    pub struct Condvar {
        inner: sync::Condvar,
        is_late: AtomicBool,
    }

    impl Condvar {
        /// Creates a condition variable without waiters.
        pub fn new() -> Self {
            Self { inner: sync::Condvar::new(), is_late: AtomicBool::new(false) }
        }

        /// Wakes one waiter.
        pub fn notify_one(&self) {
            self.inner.notify_one();
        }

        /// Wakes all waiters.
        pub fn notify_all(&self) {
            self.inner.notify_all();
        }

        /// Waits until a notification or [`Condvar::expire_waits`].
        pub fn wait_timeout<'a, T>(
            &self,
            guard: MutexGuard<'a, T>,
            _: Duration,
        ) -> (MutexGuard<'a, T>, bool) {
            (self.inner.wait(guard), self.is_late.load(Ordering::SeqCst))
        }

        /// Makes all current and later waits time out.
        pub fn expire_waits(&self) {
            self.is_late.store(true, Ordering::SeqCst);
            self.inner.notify_all();
        }
    }
}
