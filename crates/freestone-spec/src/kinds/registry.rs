//! Registry of a server's devices by name, with the dependencies between devices.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, OnceLock};

use freestone::ram::Family;
use freestone::sync::Mutex;

use super::Entry;
use super::parallel_open::ParallelOpen;
use crate::family::{self, BackingDevice, FamilyHolder, FamilySpec};
use crate::refusal::Refusal;

/// Maximum number of devices of one server.
pub const MAX_DEVICES: usize = 65_536;
/// Maximum number of dependent devices named in an error message.
const NAMES_SHOWN: usize = 3;

/// Errors from adding a device to the registry.
#[derive(Debug, PartialEq, Eq)]
pub enum AddError {
    /// A device with this name already exists.
    Duplicate,
    /// [`MAX_DEVICES`] devices already exist.
    Full,
    /// The device with this name, on which the new device depends, was removed meanwhile.
    Gone(String),
}

impl AddError {
    /// Converts the error to a refusal for users. `name` is the device that could not be added.
    pub fn of(&self, name: &str) -> Refusal {
        match self {
            Self::Duplicate => {
                refusal!(EEXIST, "{name}: a device of that name exists")
            }
            Self::Full => {
                refusal!(ENOSPC, "{name}: the server has the maximum number of devices, {MAX_DEVICES}")
            }
            Self::Gone(base) => {
                refusal!(ENODEV, "{name}: {base} was removed meanwhile")
            }
        }
    }
}

/// Devices of a server, in the order in which they were added. One lock protects the tables. The
/// lock is held for a lookup, a change or a list, never during work on a device. All operations
/// except listing take constant or logarithmic time.
#[derive(Default)]
pub struct Registry {
    tables: Mutex<Tables>,
    /// Remote devices that are opened in parallel in advance when the server starts.
    pub parallel_open: Arc<ParallelOpen>,
    /// Holder of the memory of families, set before devices exist if the server has one.
    pub holder: OnceLock<Arc<dyn FamilyHolder>>,
}

#[derive(Default)]
struct Tables {
    /// Devices by number. Numbers ascend in the order in which devices were added.
    entries: BTreeMap<u64, Arc<Entry>>,
    /// Numbers of the devices by name.
    names: HashMap<String, u64>,
    /// Numbers of the devices that are exports of other NBD servers.
    remote: BTreeSet<u64>,
    /// For the number of each device with dependent devices: the numbers and names of these.
    users: HashMap<u64, BTreeMap<u64, String>>,
    /// Number of the next device to be added.
    next: u64,
}

impl Registry {
    /// Returns the device with this name, or `None` if there is none.
    pub fn find(&self, name: &str) -> Option<Arc<Entry>> {
        let tables = self.tables.lock();
        tables.entries.get(tables.names.get(name)?).cloned()
    }

    /// Returns the device `name`, or an error if it does not exist. `key` is the key that contains
    /// the name, for the error message.
    pub(super) fn find_required(&self, key: &str, name: &str) -> Result<Arc<Entry>, Refusal> {
        let none = || refusal!(ENODEV, "{key}={name}: there is no such device (yet)");
        self.find(name).ok_or_else(none)
    }

    /// Creates a family of RAM disks of `size` bytes. `backing` is the device that
    /// [`backing`](Self::backing) returned. With `is_held`, the server's holder of families holds its memory, if
    /// there is one. Logs warnings about probable mistakes.
    pub fn new_family(
        &self,
        name: &str,
        spec: &FamilySpec,
        size: u64,
        backing: Option<&Arc<Entry>>,
        is_held: bool,
    ) -> Result<Family, Refusal> {
        let backing_device = backing.and_then(|entry| {
            Some(BackingDevice {
                device: entry.device()?,
                // If the device is an NBD export, its server can lose its write cache while this
                // process runs.
                write_through: entry.spec.kind.uri().is_some(),
                in_memory: entry.spec.is_volatile(),
            })
        });
        let holder = self.holder.get().filter(|_| is_held);
        let family =
            family::new(name, spec, size, backing_device.as_ref(), holder.is_some(), || self.limits())?;
        if let Some(holder) = holder
            && family.files().is_some()
        {
            holder.hold(&family)?;
        }
        Ok(family)
    }

    /// Returns the memory limits of all existing families in bytes.
    fn limits(&self) -> Vec<u64> {
        let limit = |entry: &Arc<Entry>| match entry.kind.own_family() {
            Some(family) => Some(family.mem_limit()),
            // If the lock is held, the family is just being created, and does not count yet.
            None if entry.is_outer_base() => Some(entry.family.try_lock()?.as_ref()?.mem_limit()),
            None => None,
        };
        self.all().iter().filter_map(limit).collect()
    }

    /// Returns all devices in the order in which they were added.
    pub fn all(&self) -> Vec<Arc<Entry>> {
        self.tables.lock().entries.values().cloned().collect()
    }

    /// Returns the devices that are exports of other NBD servers.
    pub fn nbd_devices(&self) -> Vec<Arc<Entry>> {
        let tables = self.tables.lock();
        tables.remote.iter().filter_map(|number| tables.entries.get(number).cloned()).collect()
    }

    /// Returns a message for each device whose seed of fault rules was chosen at random. With the
    /// seed a run can be repeated.
    pub fn seeds(&self) -> Vec<String> {
        let seed = |entry: &Arc<Entry>| {
            let layers = &entry.layers;
            layers.seed_is_random.then(|| format!("{}: faults with seed={}", entry.name(), layers.seed))
        };
        self.all().iter().filter_map(seed).collect()
    }

    /// Checks that a device with this name can be added.
    pub fn check_free(&self, name: &str) -> Result<(), AddError> {
        self.tables.lock().check_free(name)
    }

    /// Adds a device. Fails if the name is in use, the registry is full, or a dependency was
    /// removed.
    pub fn add(&self, entry: &Arc<Entry>) -> Result<(), AddError> {
        freestone::trail::step!();
        let mut tables = self.tables.lock();
        tables.check_free(entry.name())?;
        let dependencies = tables.dependencies(entry)?;
        tables.insert(entry, dependencies);
        Ok(())
    }

    /// Replaces a device by another one of the same name, which becomes the last one in order.
    /// Fails if other devices depend on the old one.
    pub fn replace(&self, old: &Arc<Entry>, new: &Arc<Entry>) -> Result<(), AddError> {
        let mut tables = self.tables.lock();
        let dependencies = tables.dependencies(new)?;
        let gone = || AddError::Gone(old.name().to_owned());
        let number =
            tables.number(old).filter(|number| !tables.users.contains_key(number)).ok_or_else(gone)?;
        tables.remove(old, number);
        tables.insert(new, dependencies);
        Ok(())
    }

    /// Removes a device. If other devices depend on it, returns them as the error. A device that is
    /// not in the registry counts as removed.
    pub fn remove(&self, entry: &Arc<Entry>) -> Result<(), Users> {
        let mut tables = self.tables.lock();
        let Some(number) = tables.number(entry) else { return Ok(()) };
        if let Some(users) = tables.users_of(number) {
            return Err(users);
        }
        tables.remove(entry, number);
        Ok(())
    }

    /// Returns the devices that depend on `entry`, or `None` if there are none.
    pub fn users(&self, entry: &Arc<Entry>) -> Option<Users> {
        let tables = self.tables.lock();
        tables.users_of(tables.number(entry)?)
    }

    /// Fails if other devices depend on `entry`, because their content would change. `done` is the
    /// participle of the operation, for the message.
    pub fn check_unused(&self, entry: &Arc<Entry>, done: &str) -> Result<(), Refusal> {
        let Some(users) = self.users(entry) else { return Ok(()) };
        let stand = if users.count == 1 { "stands" } else { "stand" };
        refuse!(EBUSY, "{}: cannot be {done}: {users} {stand} on it", entry.name())
    }
}

impl Tables {
    fn check_free(&self, name: &str) -> Result<(), AddError> {
        if self.names.contains_key(name) {
            return Err(AddError::Duplicate);
        }
        if self.entries.len() >= MAX_DEVICES { Err(AddError::Full) } else { Ok(()) }
    }

    /// Returns the numbers of the devices on which a device depends.
    fn dependencies(&self, entry: &Entry) -> Result<Vec<u64>, AddError> {
        let gone = |needed: &Arc<Entry>| AddError::Gone(needed.name().to_owned());
        entry.dependencies().iter().map(|needed| self.number(needed).ok_or_else(|| gone(needed))).collect()
    }

    fn insert(&mut self, entry: &Arc<Entry>, dependencies: Vec<u64>) {
        let number = self.next;
        self.next += 1;
        for needed in dependencies {
            self.users.entry(needed).or_default().insert(number, entry.name().to_owned());
        }
        if entry.spec.kind.uri().is_some() {
            self.remote.insert(number);
        }
        self.names.insert(entry.name().to_owned(), number);
        self.entries.insert(number, Arc::clone(entry));
    }

    fn remove(&mut self, entry: &Entry, number: u64) {
        for needed in entry.dependencies() {
            let Some(dependency) = self.number(needed) else { continue };
            if let Some(users) = self.users.get_mut(&dependency) {
                users.remove(&number);
                if users.is_empty() {
                    self.users.remove(&dependency);
                }
            }
        }
        self.remote.remove(&number);
        self.names.remove(entry.name());
        self.entries.remove(&number);
    }

    /// Returns the number of a device, or `None` if it is not in the registry. Another device with
    /// the same name does not match.
    fn number(&self, entry: &Arc<Entry>) -> Option<u64> {
        let number = *self.names.get(entry.name())?;
        self.entries.get(&number).is_some_and(|found| Arc::ptr_eq(found, entry)).then_some(number)
    }

    fn users_of(&self, number: u64) -> Option<Users> {
        let users = self.users.get(&number)?;
        let first = users.values().take(NAMES_SHOWN).cloned().collect();
        Some(Users { first, count: users.len() })
    }
}

/// Devices that depend on another device, for messages.
#[derive(Debug, PartialEq, Eq)]
pub struct Users {
    /// Names of the first dependent devices.
    pub first: Vec<String>,
    /// Number of all dependent devices.
    pub count: usize,
}

impl std::fmt::Display for Users {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.first.join(", "))?;
        match self.count - self.first.len() {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::{Entry, build};
    use super::{AddError, Registry};

    fn add(registry: &Arc<Registry>, text: &str) -> Arc<Entry> {
        let entry = Arc::new(build(text.parse().unwrap(), registry).unwrap());
        registry.add(&entry).unwrap();
        entry
    }

    #[test]
    fn names_are_unique_and_devices_ordered() {
        let registry = Arc::default();
        let [b, _, _] = ["b=null,size=1M", "a=ram,disksize=1M", "c=null,size=1M"].map(|t| add(&registry, t));
        assert_eq!(registry.check_free("a"), Err(AddError::Duplicate));
        registry.remove(&b).unwrap();
        let names: Vec<_> = registry.all().iter().map(|e| e.name().to_owned()).collect();
        assert_eq!(names, ["a", "c"]);
        assert_eq!(registry.find("a").unwrap().kind.name(), "ram");
        assert!(registry.find("b").is_none());
        // Removing the old device again does not remove a new device with the same name.
        add(&registry, "b=null,size=1M");
        registry.remove(&b).unwrap();
        assert!(registry.find("b").is_some());
    }

    #[test]
    fn users_are_the_dependent_devices() {
        let registry = Arc::default();
        let ram = add(&registry, "r=ram,disksize=1M");
        let snapshot = add(&registry, "s=snapshot,origin=r");
        // A snapshot in memory does not depend on its origin, so the RAM disk has no users.
        assert_eq!(registry.users(&ram), None);
        let forks: Vec<_> = (0..5).map(|n| add(&registry, &format!("f{n}=fork,base=s"))).collect();
        let users = registry.remove(&snapshot).unwrap_err();
        assert_eq!(users.to_string(), "f0, f1, f2 and 2 more");
        // A snapshot of a fork depends on the base of the fork, not on the fork.
        let second = add(&registry, "s2=snapshot,origin=f0");
        for fork in &forks {
            registry.remove(fork).unwrap();
        }
        assert_eq!(registry.users(&snapshot).unwrap().to_string(), "s2");
        registry.remove(&second).unwrap();
        registry.remove(&snapshot).unwrap();
        let refusal = Arc::new(build("f=fork,base=r".parse().unwrap(), &registry).err().unwrap());
        assert!(refusal.sentence.starts_with("f: base=r: "), "{refusal:?}");
    }

    #[test]
    fn add_after_removal_of_base_fails() {
        let registry = Arc::default();
        add(&registry, "r=ram,disksize=1M");
        let snapshot = add(&registry, "s=snapshot,origin=r");
        let fork = Arc::new(build("f=fork,base=s".parse().unwrap(), &registry).unwrap());
        registry.remove(&snapshot).unwrap();
        assert_eq!(registry.add(&fork), Err(AddError::Gone("s".into())));
    }
}
