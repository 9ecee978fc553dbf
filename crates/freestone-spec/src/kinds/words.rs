//! Words (keys and values) of a specification that would create a device with its present settings:
//! the original words with later changes applied.

use freestone::sync::Mutex;

use super::Spec;
use crate::entries::Entries;

/// Changed words of a device, or `None` if no setting was changed. The lock is held only to read or
/// replace them.
#[derive(Default)]
pub struct Words(Mutex<Option<Entries>>);

impl Words {
    /// Returns the present words of a device that was created with `spec`.
    pub fn current(&self, spec: &Spec) -> Entries {
        self.0.lock().clone().unwrap_or_else(|| spec.words.clone())
    }

    /// Sets the value of a key. An attribute that is not a key of the kind is ignored.
    pub(crate) fn put(&self, spec: &Spec, key: &str, value: &str) {
        let mut words = self.0.lock();
        let mut changed = words.clone().unwrap_or_else(|| spec.words.clone());
        changed.put(key, value);
        if Spec::from_entries(changed.clone()).is_ok() {
            *words = Some(changed);
        }
    }

    /// Removes a key from the words.
    pub(crate) fn forget(&self, spec: &Spec, key: &str) {
        self.0.lock().get_or_insert_with(|| spec.words.clone()).pairs.retain(|(known, _)| known != key);
    }
}
