//! The words that would make a device as it is set up now: those that it was made with, and what was
//! set since.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Spec;
use crate::entries::Entries;

/// Locked for a look or a change.
pub struct Words(Mutex<Entries>);

impl Words {
    /// Of a device that was just made.
    pub fn new(words: Entries) -> Self {
        Self(Mutex::new(words))
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        // Nothing in here can be half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As of now.
    pub fn now(&self) -> Entries {
        self.lock().clone()
    }

    /// A key has another value from now on. What is no key of the kind is not kept.
    pub(crate) fn put(&self, key: &str, value: &str) {
        let mut words = self.lock();
        let mut changed = words.clone();
        changed.put(key, value);
        if Spec::from_entries(changed.clone()).is_ok() {
            *words = changed;
        }
    }

    /// A key is not there any more.
    pub(crate) fn forget(&self, key: &str) {
        self.lock().pairs.retain(|(known, _)| known != key);
    }
}
