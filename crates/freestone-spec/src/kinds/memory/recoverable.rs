//! Families whose memory another process holds, too, so that the next server adopts it if this one is killed.

use std::collections::HashMap;
use std::sync::Arc;

use freestone::ram::{AdoptError, Family, FamilyMemory, Ram};

use crate::family::{self, FamilySpec};
use crate::kinds::Entry;
use crate::kinds::registry::Registry;
use crate::refusal::Refusal;

impl Registry {
    /// Takes over the family of a server that has ended. `spec` has the algorithms of the family. Returns the
    /// family, and its devices by key.
    ///
    /// # Errors
    /// As [`FamilyMemory::adopt`]; `EINVAL` if the settings are invalid. The memory stays as it was.
    pub fn adopt_family(
        &self,
        name: &str,
        spec: &FamilySpec,
        memory: FamilyMemory,
    ) -> Result<(Family, HashMap<u64, Ram>), Refusal> {
        let config = family::adoptable_config(spec)?;
        let base = &mut |key| self.find_by_key(key).and_then(|entry| entry.device().cloned());
        let (family, devices) = memory.adopt(config, base).map_err(|error| match error {
            AdoptError::Setup(error) => family::setup_refusal(error),
            AdoptError::NoBase(_) => refusal!(ENODEV, "its base does not exist"),
            error => refusal!(EIO, "{error}"),
        })?;
        family.set_name(name);
        Ok((family, devices.into_iter().map(|device| (device.key, device.ram)).collect()))
    }

    /// Returns the device with a [key](crate::kinds::Identity::key).
    fn find_by_key(&self, key: u64) -> Option<Arc<Entry>> {
        self.all().into_iter().find(|entry| entry.identity.key() == key)
    }
}

impl Entry {
    /// Records in the memory of the family which device this is, and from which one it reads, so that the next
    /// server can adopt it. Has no effect on other families.
    pub fn record_key(&self) {
        if let Some(ram) = self.kind.ram() {
            ram.set_keys(self.identity.key(), self.base_key());
        }
    }

    /// Records that the device replaces `former`, which has the same identity.
    pub fn record_key_after(&self, former: &Self) {
        if let (Some(ram), Some(former)) = (self.kind.ram(), former.kind.ram()) {
            ram.succeed(former, self.identity.key(), self.base_key());
        }
    }

    /// Returns the key of the device from which pages are read that this one does not have; 0 if there is none.
    fn base_key(&self) -> u64 {
        // The other dependency of a device in memory, a backing device, excludes families that are held.
        self.dependencies.first().map_or(0, |base| base.identity.key())
    }

    /// Makes an adopted family the one of this base's forks.
    pub fn adopt_family(&self, family: &Family) {
        if self.ram_data().is_none() {
            *self.family.lock() = Some(family.clone());
        }
    }
}
