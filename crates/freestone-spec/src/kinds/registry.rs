//! The devices of a server by name, and which of them stand on which.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use freestone::ram::Family;

use super::Entry;
use super::ahead::Ahead;
use crate::family::{self, FamilySpec, Target};
use crate::refusal::{Errno, Refusal};

/// Most devices of one server.
pub const MAX_DEVICES: usize = 65_536;
/// Names that a refusal lists.
const NAMES_SHOWN: usize = 3;

/// Why a device was not added.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// There is one of that name.
    Duplicate,
    /// [`MAX_DEVICES`] are there.
    Full,
    /// What it stands on was removed meanwhile.
    Gone(String),
}

impl Refused {
    /// As users are told it of the device `name`.
    pub fn of(&self, name: &str) -> Refusal {
        match self {
            Self::Duplicate => {
                Refusal::failed(Errno::EEXIST, format!("{name}: a device of that name exists"))
            }
            Self::Full => Refusal::failed(Errno::ENOSPC, format!("{name}: no room for another device")),
            Self::Gone(base) => {
                Refusal::failed(Errno::ENODEV, format!("{name}: {base} was removed at the same time"))
            }
        }
    }
}

/// Devices in the order in which they came. One lock, held to look up, to change or to list, never
/// during work on a device. Nothing but listing depends on how many devices there are, search trees
/// apart.
#[derive(Default)]
pub struct Registry {
    tables: Mutex<Tables>,
    /// Devices that a start opens before their turn.
    pub ahead: Arc<Ahead>,
}

#[derive(Default)]
struct Tables {
    /// By number, in the order of coming.
    entries: BTreeMap<u64, Arc<Entry>>,
    names: HashMap<String, u64>,
    /// Those that are exports of NBD servers.
    remote: BTreeSet<u64>,
    /// Who stands on a device, by its number.
    users: HashMap<u64, BTreeMap<u64, String>>,
    next: u64,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Tables> {
        // Nothing below panics between two changes that belong together.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device of that name.
    pub fn find(&self, name: &str) -> Option<Arc<Entry>> {
        let tables = self.lock();
        tables.entries.get(tables.names.get(name)?).cloned()
    }

    /// What a device is to stand on, as `key` says.
    pub(super) fn needed(&self, key: &str, name: &str) -> Result<Arc<Entry>, Refusal> {
        let none = || Refusal::failed(Errno::ENODEV, format!("{key}={name}: there is no such device (yet)"));
        self.find(name).ok_or_else(none)
    }

    /// A new family, whose disks have `size` bytes together, with the device that was
    /// [found](Self::backing) for its pages. Warns of what may not be meant.
    pub fn new_family(
        &self,
        name: &str,
        asked: &FamilySpec,
        size: u64,
        backing: Option<&Arc<Entry>>,
    ) -> Result<Family, Refusal> {
        let target = backing.and_then(|entry| {
            Some(Target {
                device: entry.device()?,
                // The server of an export can lose its cache while this one lives.
                write_through: entry.spec.kind.uri().is_some(),
                in_memory: entry.spec.is_lost(),
            })
        });
        family::new(name, asked, size, target.as_ref(), || self.limits())
    }

    /// The limits of all families.
    fn limits(&self) -> Vec<u64> {
        let limit = |entry: &Arc<Entry>| match entry.kind.own_family() {
            Some(family) => Some(family.mem_limit()),
            // One that is being made is not there yet.
            None if entry.is_outer_base() => Some(entry.family.try_lock().ok()?.as_ref()?.mem_limit()),
            None => None,
        };
        self.all().iter().filter_map(limit).collect()
    }

    /// All devices.
    pub fn all(&self) -> Vec<Arc<Entry>> {
        self.lock().entries.values().cloned().collect()
    }

    /// Those that are exports of NBD servers.
    pub fn remote(&self) -> Vec<Arc<Entry>> {
        let tables = self.lock();
        tables.remote.iter().filter_map(|number| tables.entries.get(number).cloned()).collect()
    }

    /// Sentences with the seeds that nobody chose: to make everything happen again.
    pub fn seeds(&self) -> Vec<String> {
        let told = |entry: &Arc<Entry>| {
            let layers = &entry.layers;
            layers.seed_is_random.then(|| format!("{}: faults with seed={}", entry.name(), layers.seed))
        };
        self.all().iter().filter_map(told).collect()
    }

    /// Whether a device of that name would be taken.
    pub fn check_free(&self, name: &str) -> Result<(), Refused> {
        self.lock().check_free(name)
    }

    /// Adds a device.
    pub fn add(&self, entry: &Arc<Entry>) -> Result<(), Refused> {
        let mut tables = self.lock();
        tables.check_free(entry.name())?;
        let below = tables.below(entry)?;
        tables.put(entry, below);
        Ok(())
    }

    /// Puts another device in the place of one of the same name that nobody stands on; in the order
    /// it comes last.
    pub fn replace(&self, old: &Arc<Entry>, new: &Arc<Entry>) -> Result<(), Refused> {
        let mut tables = self.lock();
        let below = tables.below(new)?;
        let gone = || Refused::Gone(old.name().to_owned());
        let number =
            tables.number(old).filter(|number| !tables.users.contains_key(number)).ok_or_else(gone)?;
        tables.take(old, number);
        tables.put(new, below);
        Ok(())
    }

    /// Takes a device out, unless others stand on it: then it answers who. One that is not there
    /// (any more) is out already.
    pub fn remove(&self, entry: &Arc<Entry>) -> Result<(), Users> {
        let mut tables = self.lock();
        let Some(number) = tables.number(entry) else { return Ok(()) };
        if let Some(users) = tables.users_of(number) {
            return Err(users);
        }
        tables.take(entry, number);
        Ok(())
    }

    /// Who stands on a device; `None` where nobody does.
    pub fn users(&self, entry: &Arc<Entry>) -> Option<Users> {
        let tables = self.lock();
        tables.users_of(tables.number(entry)?)
    }

    /// Refuses where others stand on the device: what they show would change.
    pub fn check_unused(&self, entry: &Arc<Entry>, done: &str) -> Result<(), Refusal> {
        let Some(users) = self.users(entry) else { return Ok(()) };
        let stand = if users.count == 1 { "stands" } else { "stand" };
        let why = format!("{}: cannot be {done}: {users} {stand} on it", entry.name());
        Err(Refusal::failed(Errno::EBUSY, why))
    }
}

impl Tables {
    fn check_free(&self, name: &str) -> Result<(), Refused> {
        if self.names.contains_key(name) {
            return Err(Refused::Duplicate);
        }
        if self.entries.len() >= MAX_DEVICES { Err(Refused::Full) } else { Ok(()) }
    }

    /// The numbers of what a device is to stand on.
    fn below(&self, entry: &Entry) -> Result<Vec<u64>, Refused> {
        let gone = |needed: &Arc<Entry>| Refused::Gone(needed.name().to_owned());
        entry.needs().iter().map(|needed| self.number(needed).ok_or_else(|| gone(needed))).collect()
    }

    fn put(&mut self, entry: &Arc<Entry>, below: Vec<u64>) {
        let number = self.next;
        self.next += 1;
        for needed in below {
            self.users.entry(needed).or_default().insert(number, entry.name().to_owned());
        }
        if entry.spec.kind.uri().is_some() {
            self.remote.insert(number);
        }
        self.names.insert(entry.name().to_owned(), number);
        self.entries.insert(number, Arc::clone(entry));
    }

    fn take(&mut self, entry: &Entry, number: u64) {
        for needed in entry.needs() {
            let Some(below) = self.number(needed) else { continue };
            if let Some(users) = self.users.get_mut(&below) {
                users.remove(&number);
                if users.is_empty() {
                    self.users.remove(&below);
                }
            }
        }
        self.remote.remove(&number);
        self.names.remove(entry.name());
        self.entries.remove(&number);
    }

    /// The number of this very device.
    fn number(&self, entry: &Arc<Entry>) -> Option<u64> {
        let number = *self.names.get(entry.name())?;
        self.entries.get(&number).is_some_and(|found| Arc::ptr_eq(found, entry)).then_some(number)
    }

    fn users_of(&self, number: u64) -> Option<Users> {
        let users = self.users.get(&number)?;
        let some = users.values().take(NAMES_SHOWN).cloned().collect();
        Some(Users { some, count: users.len() })
    }
}

/// Devices that stand on another.
#[derive(Debug, PartialEq, Eq)]
pub struct Users {
    /// The first ones.
    pub some: Vec<String>,
    /// How many.
    pub count: usize,
}

impl std::fmt::Display for Users {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.some.join(", "))?;
        match self.count - self.some.len() {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::{Entry, build};
    use super::{Refused, Registry};

    fn add(registry: &Arc<Registry>, text: &str) -> Arc<Entry> {
        let entry = Arc::new(build(text.parse().unwrap(), registry).unwrap());
        registry.add(&entry).unwrap();
        entry
    }

    #[test]
    fn names_are_unique_and_order_is_kept() {
        let registry = Arc::default();
        let [b, _, _] = ["b=null,size=1M", "a=ram,disksize=1M", "c=null,size=1M"].map(|t| add(&registry, t));
        assert_eq!(registry.check_free("a"), Err(Refused::Duplicate));
        registry.remove(&b).unwrap();
        let names: Vec<_> = registry.all().iter().map(|e| e.name().to_owned()).collect();
        assert_eq!(names, ["a", "c"]);
        assert_eq!(registry.find("a").unwrap().kind.name(), "ram");
        assert!(registry.find("b").is_none());
        // Another device that got the name is not meant.
        add(&registry, "b=null,size=1M");
        registry.remove(&b).unwrap();
        assert!(registry.find("b").is_some());
    }

    #[test]
    fn who_stands_on_a_device_is_known() {
        let registry = Arc::default();
        let ram = add(&registry, "r=ram,disksize=1M");
        let snapshot = add(&registry, "s=snapshot,origin=r");
        // The snapshot holds what it shows.
        assert_eq!(registry.users(&ram), None);
        let forks: Vec<_> = (0..5).map(|n| add(&registry, &format!("f{n}=fork,base=s"))).collect();
        let users = registry.remove(&snapshot).unwrap_err();
        assert_eq!(users.to_string(), "f0, f1, f2 and 2 more");
        // A snapshot of a fork stands on what the fork stands on.
        let second = add(&registry, "s2=snapshot,origin=f0");
        for fork in &forks {
            registry.remove(fork).unwrap();
        }
        assert_eq!(registry.users(&snapshot).unwrap().to_string(), "s2");
        registry.remove(&second).unwrap();
        registry.remove(&snapshot).unwrap();
        let late = Arc::new(build("f=fork,base=r".parse().unwrap(), &registry).err().unwrap());
        assert!(late.sentence.starts_with("f: base=r: "), "{late:?}");
    }

    #[test]
    fn what_stands_on_something_that_went_is_not_added() {
        let registry = Arc::default();
        add(&registry, "r=ram,disksize=1M");
        let snapshot = add(&registry, "s=snapshot,origin=r");
        let fork = Arc::new(build("f=fork,base=s".parse().unwrap(), &registry).unwrap());
        registry.remove(&snapshot).unwrap();
        assert_eq!(registry.add(&fork), Err(Refused::Gone("s".into())));
    }
}
