//! The family of a base's forks, which are RAM disks that share one memory pool. The family is
//! created with the first fork. Its settings are attributes of the base.

use std::sync::{PoisonError, TryLockError};

use freestone::ram::Family;
use serde_json::Value;

use crate::entries::with_article;
use crate::family;
use crate::kinds::Entry;
use crate::kinds::registry::Registry;
use crate::refusal::{Errno, Refusal};

impl Entry {
    /// Returns true if the device can be a base that does not share the memory of its forks.
    pub fn is_outer_base(&self) -> bool {
        self.kind.is_outer_base(self.is_read_only())
    }

    /// Returns true if the device is not a RAM disk itself, but has a family whose memory limit can
    /// be set.
    pub fn has_family(&self) -> bool {
        self.is_outer_base() || self.kind.cow_ram().is_some()
    }

    /// Returns the family of the device or of its forks, or `None` if the family does not exist
    /// yet.
    pub fn existing_family(&self) -> Option<Family> {
        match self.ram_data() {
            Some(ram) => Some(ram.family()),
            // The lock is held while the family is created, which may wait for a slow backing
            // device. So this function must not wait for the lock.
            None => match self.family.try_lock() {
                Ok(family) => family.clone(),
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().clone(),
                Err(TryLockError::WouldBlock) => None,
            },
        }
    }

    /// Returns the family of the device or of its forks. Creates the family if it does not exist
    /// yet.
    pub fn ensure_family(&self, registry: &Registry) -> Result<Family, Refusal> {
        if let Some(ram) = self.ram_data() {
            return Ok(ram.family());
        }
        let mut slot = self.family.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(family) = &*slot {
            return Ok(family.clone());
        }
        let Some(spec) = self.spec.kind.family() else {
            let why = format!("{}: {} device cannot be a base", self.name(), with_article(self.kind.name()));
            return Err(Refusal::failed(Errno::EINVAL, why));
        };
        // `new_family` reads the limits of the other families with `try_lock`, so it skips this
        // one, which is locked.
        let family = registry.new_family(self.name(), spec, self.size(), self.backing.as_ref());
        let family = family.map_err(|refusal| refusal.of(self.name()))?;
        *slot = Some(family.clone());
        Ok(family)
    }

    /// Returns the value of an attribute of the forks' family. Before the first fork, that is the
    /// specified value.
    pub(in crate::kinds) fn family_value(&self, attr: &str) -> Option<Value> {
        family::value(self.spec.kind.family()?, self.existing_family(), attr)
    }
}
