//! The family of a base's forks, which are RAM disks that share one memory pool. The family is
//! created with the first fork. Its settings are attributes of the base.

use freestone::ram::Family;
use serde_json::Value;

use crate::entries::with_article;
use crate::family;
use crate::kinds::Entry;
use crate::kinds::registry::Registry;
use crate::refusal::Refusal;

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

    /// Returns true if the settings of the family of the device's forks are attributes of the device.
    pub(crate) fn shows_family(&self) -> bool {
        self.is_outer_base() || self.kind.cow().is_some()
    }

    /// Returns the names of the attributes of the kind, and of those of the family of the device's forks.
    pub(crate) fn kind_attrs(&self) -> Vec<&'static str> {
        let family = if self.shows_family() { &family::NAMES[..] } else { &[] };
        [self.kind.attrs(), family].concat()
    }

    /// Returns the family of the device or of its forks, or `None` if the family does not exist
    /// yet.
    pub fn existing_family(&self) -> Option<Family> {
        match self.ram_data() {
            Some(ram) => Some(ram.family()),
            // The lock is held while the family is created, which may wait for a slow backing
            // device. So this function must not wait for the lock.
            None => self.family.try_lock()?.clone(),
        }
    }

    /// Returns the family of the device or of its forks. Creates the family if it does not exist
    /// yet.
    pub fn ensure_family(&self, registry: &Registry) -> Result<Family, Refusal> {
        if let Some(ram) = self.ram_data() {
            return Ok(ram.family());
        }
        let mut slot = self.family.lock();
        if let Some(family) = &*slot {
            return Ok(family.clone());
        }
        let Some(spec) = self.spec.kind.family() else {
            refuse!(EINVAL, "{}: {} device cannot be a base", self.name(), with_article(self.kind.name()));
        };
        // `new_family` reads the limits of the other families with `try_lock`, so it skips this
        // one, which is locked.
        let family = registry.new_family(self.name(), spec, self.size(), self.backing.as_ref(), true);
        let family = family.map_err(|refusal| refusal.of(self.name()))?;
        *slot = Some(family.clone());
        Ok(family)
    }

    /// Returns the value of an attribute of the forks' family. Before the first fork, that is the
    /// specified value.
    pub(crate) fn family_value(&self, attr: &str) -> Option<Value> {
        family::value(self.spec.kind.family()?, self.existing_family(), attr)
    }
}
