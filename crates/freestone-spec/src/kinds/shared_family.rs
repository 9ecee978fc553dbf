//! The family of a base's forks: RAM disks sharing one pool. It is created with the first fork, and
//! its settings are attributes of the base.

use std::sync::{PoisonError, TryLockError};

use freestone::ram::Family;
use serde_json::Value;

use super::Entry;
use super::registry::Registry;
use crate::entries::a_kind;
use crate::family;
use crate::refusal::{Errno, Refusal};

impl Entry {
    /// Returns true if the device can be a base outside of the family of its forks.
    pub fn is_outer_base(&self) -> bool {
        self.kind.is_outer_base(self.is_read_only())
    }

    /// Returns true if the device, which is not a RAM disk itself, has a family whose memory limit can be
    /// set.
    pub fn has_family(&self) -> bool {
        self.is_outer_base() || self.kind.copies().is_some()
    }

    /// Returns the family of the device or of its forks, if it exists.
    pub fn family_made(&self) -> Option<Family> {
        match self.in_memory() {
            Some(ram) => Some(ram.family()),
            // The lock is held while the family is created, which may wait for its backing device. Do not
            // wait for that.
            None => match self.family.try_lock() {
                Ok(family) => family.clone(),
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().clone(),
                Err(TryLockError::WouldBlock) => None,
            },
        }
    }

    /// Returns the family of the device or of its forks. Creates it for the first fork.
    pub fn family_of(&self, registry: &Registry) -> Result<Family, Refusal> {
        if let Some(ram) = self.in_memory() {
            return Ok(ram.family());
        }
        let mut slot = self.family.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(family) = &*slot {
            return Ok(family.clone());
        }
        let Some(spec) = self.spec.kind.family() else {
            let why = format!("{}: {} device cannot be a base", self.name(), a_kind(self.kind.name()));
            return Err(Refusal::failed(Errno::EINVAL, why));
        };
        // `new_family` reads the limits of the other families with `try_lock`, so it skips this one.
        let family = registry.new_family(self.name(), spec, self.size(), self.backing.as_ref());
        let family = family.map_err(|refusal| refusal.of(self.name()))?;
        *slot = Some(family.clone());
        Ok(family)
    }

    /// Returns an attribute of the forks' family. Before the first fork, it has the specified value.
    pub(super) fn family_value(&self, attr: &str) -> Option<Value> {
        family::value(self.spec.kind.family()?, self.family_made(), attr)
    }
}
