//! Counts the completions that decide when a server is killed, and describes verbs that a kill has
//! cut off.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::disk::Disk;
use crate::program::transport::Address;

/// A verb without an answer, by its effect. After the next start, either all of the effect is
/// present or nothing.
pub enum InterruptedVerb {
    Creates(Vec<Disk>),
    Removes(Arc<Disk>),
    /// Publishes a device at these addresses. Without addresses: releases a withheld device.
    Publishes(Arc<Disk>, Vec<Address>),
    /// Removes all addresses of this device.
    Unpublishes(Arc<Disk>),
    /// Sets the memory limit of this device, in bytes.
    Limits(Arc<Disk>, u64),
    /// Sets the size of this device, in bytes.
    Grows(Arc<Disk>, u64),
}

impl InterruptedVerb {
    /// Returns the name of the group in which the verb is counted.
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

/// Number of requests and verbs that the current server has completed.
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

    pub fn clear(&self) {
        *self.count() = 0;
    }

    /// Waits for at most `wait` until `many` requests and verbs have completed. Returns false if
    /// fewer have.
    pub fn wait_for(&self, many: u64, wait: Duration) -> bool {
        let count = self.count();
        let waited = self.more.wait_timeout_while(count, wait, |count| *count < many);
        *waited.unwrap_or_else(PoisonError::into_inner).0 >= many
    }
}
