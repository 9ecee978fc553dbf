//! Answers, by which it is counted when a server is killed, and the verbs that had none then.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::disk::Disk;
use super::link::Place;

/// What a verb would have done of which there was no answer: all of it is there after the next start,
/// or nothing.
pub enum Flight {
    /// It makes devices.
    Makes(Vec<Disk>),
    /// It removes one.
    Removes(Arc<Disk>),
    /// It publishes one at these places, or where it was withheld from.
    Shows(Arc<Disk>, Vec<Place>),
    /// It takes one off all places.
    Hides(Arc<Disk>),
    /// It sets the memory limit, in bytes.
    Limits(Arc<Disk>, u64),
    /// It grows to so many bytes.
    Grows(Arc<Disk>, u64),
}

impl Flight {
    /// How it is counted.
    pub fn verb(&self) -> &'static str {
        match self {
            Self::Makes(_) => "that make devices",
            Self::Removes(_) => "that remove one",
            Self::Shows(..) => "that publish one",
            Self::Hides(_) => "that unpublish one",
            Self::Limits(..) | Self::Grows(..) => "that set something",
        }
    }
}

/// How many requests and verbs were answered in the life of a server.
#[derive(Default)]
pub struct Answers {
    count: Mutex<u64>,
    more: Condvar,
}

impl Answers {
    fn count(&self) -> MutexGuard<'_, u64> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add(&self) {
        *self.count() += 1;
        self.more.notify_all();
    }

    /// A server begins.
    pub fn clear(&self) {
        *self.count() = 0;
    }

    /// Whether there are so many; waits a little where there are not.
    pub fn reached(&self, many: u64, wait: Duration) -> bool {
        let count = self.count();
        let waited = self.more.wait_timeout_while(count, wait, |count| *count < many);
        *waited.unwrap_or_else(PoisonError::into_inner).0 >= many
    }
}
