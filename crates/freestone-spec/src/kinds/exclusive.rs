//! Exclusive use of a device of the server by another one: as COW device or as backing device. Other
//! users could not interpret the data there, and would damage it.

use std::sync::Arc;

use freestone::device::Device;

use super::Entry;
use super::registry::Registry;
use crate::family::{BackingPlace, FamilySpec};
use crate::refusal::{Errno, Refusal};

/// Exclusive use of a device by another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExclusiveUse<'a> {
    /// Key of the specification that requests it.
    pub key: &'static str,
    /// Value of the key.
    pub typed: &'a str,
    /// Name of the used device.
    pub name: &'a str,
    /// Data stored there, for messages: `copies` or `pages`.
    pub what: &'static str,
}

impl<'a> ExclusiveUse<'a> {
    /// Returns the use of a COW device for the copies of a snapshot.
    pub(super) fn copies(name: &'a str) -> Self {
        Self { key: "cow", typed: name, name, what: "copies" }
    }

    /// Returns the use of a backing device for the pages of a family, if it is a device of the server.
    pub(super) fn pages(family: &'a FamilySpec) -> Option<Self> {
        match &family.backing.as_ref()?.place {
            BackingPlace::Device { typed, name } => {
                Some(Self { key: "backing_dev", typed, name, what: "pages" })
            }
            BackingPlace::Path(_) => None,
        }
    }

    /// Creates an error about the value of the key.
    pub fn refuse(&self, errno: Errno, why: &str) -> Refusal {
        Refusal::failed(errno, format!("{}={}: {why}", self.key, self.typed))
    }

    /// Finds the device, and checks that it can be written in any order and up to its end.
    pub(super) fn find(&self, registry: &Registry) -> Result<(Arc<Entry>, Arc<dyn Device>), Refusal> {
        let Self { name, what, .. } = self;
        let refuse = |errno, why: &str| Err(self.refuse(errno, why));
        let Some(entry) = registry.find(name) else {
            return refuse(Errno::ENODEV, "there is no such device (yet)");
        };
        if entry.layers.zones.is_some() {
            let why = format!("takes no {what}: it is zoned, and {what} are written in any order");
            return refuse(Errno::EINVAL, &why);
        }
        let (Some(device), Some(_)) = (entry.device(), &entry.cow_origin) else {
            let why = format!("{what} need a ram, null, fork, file, nbd or rbd device that can be written");
            return refuse(Errno::EINVAL, &why);
        };
        if device.geometry().padding > 0 {
            let why = format!("its file ends within a block, so {what} cannot be stored up to its end");
            return refuse(Errno::EINVAL, &why);
        }
        let device = Arc::clone(device);
        Ok((entry, device))
    }

    /// Fails if other devices depend on the device.
    pub(super) fn check_free(&self, entry: &Arc<Entry>, registry: &Registry) -> Result<(), Refusal> {
        let Some(users) = registry.users(entry) else { return Ok(()) };
        Err(self.refuse(Errno::EBUSY, &format!("is in use by {users}")))
    }
}

impl Registry {
    /// Returns the backing device of a family, if it is a device of the server.
    pub fn backing(&self, family: &FamilySpec) -> Result<Option<Arc<Entry>>, Refusal> {
        let Some(takes) = ExclusiveUse::pages(family) else { return Ok(None) };
        let (entry, _) = takes.find(self)?;
        let refuse = |why| Err(takes.refuse(Errno::EINVAL, why));
        if keeps_nothing(&entry) {
            return refuse("keeps nothing of what is written; use memory_backed=1");
        }
        if entry.layers.power.is_some() {
            return refuse(
                "keeps what is not flushed in memory, and loses it with its power; use one without power_cut, \
                 cache_size and record",
            );
        }
        takes.check_free(&entry, self)?;
        Ok(Some(entry))
    }

    /// Returns the exclusive user of a device, as the continuation of a sentence about the device.
    pub fn taken_by(&self, entry: &Arc<Entry>) -> Option<String> {
        // An exclusive user is the only user, so the shortened list contains it.
        self.users(entry)?.some.iter().find_map(|name| {
            let user = self.find(name)?;
            if user.backing.as_ref().is_some_and(|backing| Arc::ptr_eq(backing, entry)) {
                return Some(format!("holds pages of {name}"));
            }
            (user.spec.kind.copies_to() == Some(entry.name())).then(|| format!("holds the copies of {name}"))
        })
    }
}

/// Returns true for a drive that drops writes and reads as zeroes.
pub(super) fn keeps_nothing(entry: &Entry) -> bool {
    entry.spec.kind.data_info().drive.is_some_and(|drive| !drive.stores)
}
