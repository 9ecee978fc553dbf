//! The words that would make a device as it is set up now: those that it was made with, and what was
//! set since.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Spec;
use crate::entries::Entries;

/// Nothing where nothing was set. Locked for a look or a change.
#[derive(Default)]
pub struct Words(Mutex<Option<Entries>>);

impl Words {
    fn lock(&self) -> MutexGuard<'_, Option<Entries>> {
        // Nothing in here can be half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As of now, of a device that was made with the words of `spec`.
    pub fn now(&self, spec: &Spec) -> Entries {
        self.lock().clone().unwrap_or_else(|| spec.words.clone())
    }

    /// A key has another value from now on. What is no key of the kind is not kept.
    pub(crate) fn put(&self, spec: &Spec, key: &str, value: &str) {
        let mut words = self.lock();
        let mut changed = words.clone().unwrap_or_else(|| spec.words.clone());
        changed.put(key, value);
        if Spec::from_entries(changed.clone()).is_ok() {
            *words = Some(changed);
        }
    }

    /// A key is not there any more.
    pub(crate) fn forget(&self, spec: &Spec, key: &str) {
        self.lock().get_or_insert_with(|| spec.words.clone()).pairs.retain(|(known, _)| known != key);
    }
}
