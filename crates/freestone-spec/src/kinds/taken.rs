//! Devices of the server that another one has to itself: what it writes there means nothing to
//! anybody else.

use std::sync::Arc;

use freestone::device::Device;

use super::Entry;
use super::registry::Registry;
use crate::family::{BackingPlace, FamilySpec};
use crate::refusal::{Errno, Refusal};

/// That a device is to have another to itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Takes<'a> {
    /// The key that says so.
    pub key: &'static str,
    /// Its value.
    pub typed: &'a str,
    /// The name of the other one.
    pub name: &'a str,
    /// What it is for.
    pub what: &'static str,
}

impl<'a> Takes<'a> {
    /// For the copies of a snapshot.
    pub(super) fn copies(name: &'a str) -> Self {
        Self { key: "cow", typed: name, name, what: "copies" }
    }

    /// For pages that leave the memory of a family.
    pub(super) fn pages(family: &'a FamilySpec) -> Option<Self> {
        match &family.backing.as_ref()?.place {
            BackingPlace::Device { typed, name } => {
                Some(Self { key: "backing_dev", typed, name, what: "pages" })
            }
            BackingPlace::Path(_) => None,
        }
    }

    /// Half a sentence about its value.
    pub fn refuse(&self, errno: Errno, why: &str) -> Refusal {
        Refusal::failed(errno, format!("{}={}: {why}", self.key, self.typed))
    }

    /// The device, which can be written at any place.
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

    /// Refuses what others stand on.
    pub(super) fn check_free(&self, entry: &Arc<Entry>, registry: &Registry) -> Result<(), Refusal> {
        let Some(users) = registry.users(entry) else { return Ok(()) };
        Err(self.refuse(Errno::EBUSY, &format!("is in use by {users}")))
    }
}

impl Registry {
    /// The device that a family's pages are to go to, if it is one of these.
    pub fn backing(&self, family: &FamilySpec) -> Result<Option<Arc<Entry>>, Refusal> {
        let Some(takes) = Takes::pages(family) else { return Ok(None) };
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

    /// Who has a device to itself, as a sentence about it goes on.
    pub fn taken_by(&self, entry: &Arc<Entry>) -> Option<String> {
        // Then it has no users of another kind.
        self.users(entry)?.some.iter().find_map(|name| {
            let user = self.find(name)?;
            if user.backing.as_ref().is_some_and(|backing| Arc::ptr_eq(backing, entry)) {
                return Some(format!("holds pages of {name}"));
            }
            (user.spec.kind.copies_to() == Some(entry.name())).then(|| format!("holds the copies of {name}"))
        })
    }
}

/// A drive that reads as zeroes whatever is written to it.
pub(super) fn keeps_nothing(entry: &Entry) -> bool {
    entry.spec.kind.below_layers().drive.is_some_and(|drive| !drive.stores)
}
