//! Families whose memory another process holds, too, so that the next server adopts it if this one is killed.

use std::collections::HashMap;
use std::sync::Arc;

use freestone::ram::{Family, FamilyMemory, Ram};

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
        let base = &mut |key| self.find_by_key(key).and_then(|entry| entry.device().cloned());
        let (family, devices) = family::adopt(spec, memory, base)?;
        family.set_name(name);
        Ok((family, devices.into_iter().map(|device| (device.key, device.ram)).collect()))
    }

    /// Returns the device with a [key](crate::kinds::Identity::key).
    fn find_by_key(&self, key: u64) -> Option<Arc<Entry>> {
        self.all().into_iter().find(|entry| entry.identity.key() == key)
    }

    /// Returns the device from which pages are read that `ram` does not have.
    pub(crate) fn base_of(&self, ram: &Ram) -> Option<Arc<Entry>> {
        if ram.has_base() { self.all().into_iter().find(|entry| entry.is_base_of(ram)) } else { None }
    }
}

impl Entry {
    /// Records in the memory of the family which device this is, and from which one it reads, so that the next
    /// server can adopt it. Has no effect on other families, and on a device that was adopted.
    pub fn record_key(&self, registry: &Registry) {
        if let Some(ram) = self.kind.ram().filter(|_| !self.is_adopted) {
            ram.set_keys(self.identity.key(), self.base_key(ram, registry));
        }
    }

    /// Records that the device replaces `former`, which has the same identity.
    pub fn record_key_after(&self, former: &Self, registry: &Registry) {
        if let (Some(ram), Some(former)) = (self.kind.ram(), former.kind.ram()) {
            ram.succeed(former, self.identity.key(), self.base_key(ram, registry));
        }
    }

    /// Returns the key of the device from which pages are read that this one does not have; 0 if there is none.
    fn base_key(&self, ram: &Ram, registry: &Registry) -> u64 {
        // A device that was restored after it was rewound to a snapshot does not depend on this base.
        let dependency = self.dependencies.iter().find(|base| base.is_base_of(ram)).cloned();
        let base = dependency.or_else(|| registry.base_of(ram));
        // An unknown base has a key that no device has: the next server must not read zeroes instead.
        base.map_or(u64::from(ram.has_base()), |base| base.identity.key())
    }

    fn is_base_of(&self, ram: &Ram) -> bool {
        match self.kind.memory_snapshot() {
            Some(snapshot) => ram.is_based_on(snapshot),
            None => self.device().is_some_and(|device| ram.is_based_on_device(device)),
        }
    }

    /// Makes an adopted family the one of this base's forks.
    pub fn adopt_family(&self, family: &Family) {
        if self.ram_data().is_none() {
            *self.family.lock() = Some(family.clone());
        }
    }
}
