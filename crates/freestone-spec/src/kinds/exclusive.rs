//! Exclusive use of a device by another device of the server, as COW device or as backing device.
//! Other users could not interpret the data on such a device, and would damage it.

use std::sync::Arc;

use freestone::device::Device;

use super::Entry;
use super::registry::Registry;
use crate::family::{BackingPlace, FamilySpec};
use crate::refusal::{Errno, Refusal};

/// Exclusive use of a device by another device of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExclusiveUse<'a> {
    /// Key in the specification of the using device that requests the exclusive use.
    pub key: &'static str,
    /// Value of the key, as it was typed.
    pub typed: &'a str,
    /// Name of the used device.
    pub name: &'a str,
    /// Word for the data stored on the used device, for messages: `copies` or `pages`.
    pub what: &'static str,
}

impl<'a> ExclusiveUse<'a> {
    /// Returns the exclusive use of the device `name` as COW device of a snapshot.
    pub(super) fn of_cow_device(name: &'a str) -> Self {
        Self { key: "cow", typed: name, name, what: "copies" }
    }

    /// Returns the exclusive use of the backing device of a family, or `None` if it is not a device
    /// of the server.
    pub(super) fn of_backing_device(family: &'a FamilySpec) -> Option<Self> {
        match &family.backing.as_ref()?.place {
            BackingPlace::Device { typed, name } => {
                Some(Self { key: "backing_dev", typed, name, what: "pages" })
            }
            BackingPlace::Path(_) => None,
        }
    }

    /// Creates an error that refuses the value of the key for the reason `why`.
    pub fn refuse(&self, errno: Errno, why: &str) -> Refusal {
        Refusal::failed(errno, format!("{}={}: {why}", self.key, self.typed))
    }

    /// Finds the used device in the registry, and checks that it can be written in any order and up
    /// to its end.
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

    /// Fails with `EBUSY` if other devices depend on the device `entry`.
    pub(super) fn check_free(&self, entry: &Arc<Entry>, registry: &Registry) -> Result<(), Refusal> {
        let Some(users) = registry.users(entry) else { return Ok(()) };
        Err(self.refuse(Errno::EBUSY, &format!("is in use by {users}")))
    }
}

impl Registry {
    /// Returns the backing device of a family, or `None` if it is not a device of the server. Fails
    /// if the device cannot be used.
    pub fn backing(&self, family: &FamilySpec) -> Result<Option<Arc<Entry>>, Refusal> {
        let Some(takes) = ExclusiveUse::of_backing_device(family) else { return Ok(None) };
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

    /// Returns a text about the exclusive user of a device, which continues a sentence about the
    /// device. Returns `None` without one.
    pub fn exclusive_user(&self, entry: &Arc<Entry>) -> Option<String> {
        // An exclusive user is the only user of a device, so the first names of the list contain
        // it.
        self.users(entry)?.first.iter().find_map(|name| {
            let user = self.find(name)?;
            if user.backing.as_ref().is_some_and(|backing| Arc::ptr_eq(backing, entry)) {
                return Some(format!("holds pages of {name}"));
            }
            (user.spec.kind.cow_device_name() == Some(entry.name()))
                .then(|| format!("holds the copies of {name}"))
        })
    }
}

/// Returns true if the device is a test drive that drops writes and reads as zeroes.
pub(super) fn keeps_nothing(entry: &Entry) -> bool {
    entry.spec.kind.data_info().drive.is_some_and(|drive| !drive.stores)
}
