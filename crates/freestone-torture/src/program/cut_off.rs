//! Counts completions, which decide when a server is killed, and records the verbs that were cut
//! off.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::disk::Disk;
use super::link::Address;

/// The effect of a verb without an answer: after the next start either all of it is present, or
/// nothing.
pub enum CutOffVerb {
    /// Creates devices.
    Creates(Vec<Disk>),
    /// Removes a device.
    Removes(Arc<Disk>),
    /// Publishes a device at these addresses, or releases a withheld one.
    Publishes(Arc<Disk>, Vec<Address>),
    /// Unpublishes a device.
    Unpublishes(Arc<Disk>),
    /// Sets the memory limit, in bytes.
    Limits(Arc<Disk>, u64),
    /// Sets the size, in bytes.
    Grows(Arc<Disk>, u64),
}

impl CutOffVerb {
    /// Returns the name under which the verb is counted.
    pub fn verb(&self) -> &'static str {
        match self {
            Self::Creates(_) => "that make devices",
            Self::Removes(_) => "that remove one",
            Self::Publishes(..) => "that publish one",
            Self::Unpublishes(_) => "that unpublish one",
            Self::Limits(..) | Self::Grows(..) => "that set something",
        }
    }
}

/// Number of requests and verbs that a server completed in its life.
#[derive(Default)]
pub struct Completions {
    count: Mutex<u64>,
    more: Condvar,
}

impl Completions {
    fn count(&self) -> MutexGuard<'_, u64> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add(&self) {
        *self.count() += 1;
        self.more.notify_all();
    }

    /// Resets the count for a new server.
    pub fn clear(&self) {
        *self.count() = 0;
    }

    /// Returns true if `many` have completed, after waiting for at most `wait`.
    pub fn wait_for(&self, many: u64, wait: Duration) -> bool {
        let count = self.count();
        let waited = self.more.wait_timeout_while(count, wait, |count| *count < many);
        *waited.unwrap_or_else(PoisonError::into_inner).0 >= many
    }
}
