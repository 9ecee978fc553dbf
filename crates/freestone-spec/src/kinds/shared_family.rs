//! What the forks of a base share: made with the first of them, and set through the base.

use std::sync::{PoisonError, TryLockError};

use freestone::ram::Family;
use serde_json::Value;

use super::Entry;
use super::registry::Registry;
use crate::entries::a_kind;
use crate::family;
use crate::refusal::{Errno, Refusal};

impl Entry {
    /// Whether forks can be made of it, each with a family that is not its own.
    pub fn is_outer_base(&self) -> bool {
        self.kind.is_outer_base(self.is_read_only())
    }

    /// Whether the limit, and what is done there, is set through it though it is no RAM disk.
    pub fn has_family(&self) -> bool {
        self.is_outer_base() || self.kind.copies().is_some()
    }

    /// Its family, or that of its forks, if there is one already.
    pub fn family_made(&self) -> Option<Family> {
        match self.in_memory() {
            Some(ram) => Some(ram.family()),
            // While it is made, which may wait for its backing device, there is none yet.
            None => match self.family.try_lock() {
                Ok(family) => family.clone(),
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().clone(),
                Err(TryLockError::WouldBlock) => None,
            },
        }
    }

    /// What the forks of a base have in common; made at the first one.
    pub fn family_of(&self, registry: &Registry) -> Result<Family, Refusal> {
        if let Some(ram) = self.in_memory() {
            return Ok(ram.family());
        }
        let mut made = self.family.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(family) = &*made {
            return Ok(family.clone());
        }
        let Some(spec) = self.spec.kind.family() else {
            let why = format!("{}: {} device is no base", self.name(), a_kind(self.kind.name()));
            return Err(Refusal::failed(Errno::EINVAL, why));
        };
        // Asked before the lock would be: of all others.
        let family = registry.new_family(self.name(), spec, self.size(), self.backing.as_ref());
        let family = family.map_err(|refusal| refusal.of(self.name()))?;
        *made = Some(family.clone());
        Ok(family)
    }

    /// The value of an attribute that the forks of a base share; before the first one, what was
    /// asked for.
    pub(super) fn family_value(&self, attr: &str) -> Option<Value> {
        family::value(self.spec.kind.family()?, self.family_made(), attr)
    }
}
