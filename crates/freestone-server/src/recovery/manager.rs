//! The service manager as the holder: systemd's store of descriptors (`FileDescriptorStoreMax=`), which outlives a
//! killed service until it is stopped.
//!
//! Each file has a name of its own: the prefix, the family and the number of the file. A family of which the
//! manager has the first file is complete, since that one is stored last. The manager does not acknowledge a
//! descriptor, so the limit of the store is checked here.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use uuid::Uuid;

use super::holder::{HeldFiles, Holder};
use super::messages::{FILES, of_family};

const PREFIX: &str = "freestone-";

/// The store of a service manager.
pub trait DescriptorStore: Send {
    /// Stores descriptors under their names, and waits until the manager has them.
    ///
    /// # Errors
    /// Fails if the manager does not answer.
    fn store(&self, descriptors: &[(String, BorrowedFd<'_>)]) -> io::Result<()>;

    /// Removes the descriptors with these names.
    ///
    /// # Errors
    /// Fails if the manager cannot be reached.
    fn remove(&self, names: &[String]) -> io::Result<()>;
}

/// A service manager, with the descriptors that it has passed to this server.
pub struct ServiceManager {
    /// The store.
    pub store: Box<dyn DescriptorStore>,
    /// Maximum number of descriptors in the store.
    pub max: usize,
    /// Descriptors of a killed server, by name.
    pub stored: Vec<(String, OwnedFd)>,
}

/// Returns true if this is the name of a file of a family.
pub fn is_family_file(name: &str) -> bool {
    parse(name).is_some()
}

/// Returns the family and the number of the file with this name.
fn parse(name: &str) -> Option<(Uuid, usize)> {
    let (id, number) = name.strip_prefix(PREFIX)?.rsplit_once('-')?;
    let number = number.parse().ok().filter(|number| number < FILES.end())?;
    Some((Uuid::try_parse(id).ok()?, number))
}

fn name_of(id: Uuid, number: usize) -> String {
    format!("{PREFIX}{}-{number}", id.simple())
}

/// The holder, which has the families in the store.
pub(super) struct ManagerHolder {
    manager: ServiceManager,
    /// Numbers of files in the store.
    families: HashMap<Uuid, usize>,
}

impl ManagerHolder {
    pub fn new(manager: ServiceManager) -> Self {
        Self { manager, families: HashMap::new() }
    }
}

impl Holder for ManagerHolder {
    fn connect(&mut self) -> io::Result<Vec<HeldFiles>> {
        let mut found: HashMap<Uuid, BTreeMap<usize, OwnedFd>> = HashMap::new();
        for (name, file) in self.manager.stored.drain(..) {
            if let Some((id, number)) = parse(&name) {
                found.entry(id).or_default().insert(number, file);
            }
        }
        let mut families = Vec::new();
        for (id, files) in found {
            let (count, has_all) = (files.len(), files.contains_key(&0));
            match of_family(files.into_values().collect()).filter(|_| has_all) {
                Some(files) => {
                    self.families.insert(id, count);
                    families.push((id, files));
                }
                // The server was killed before the manager had all files, and before clients had the device.
                None => self.manager.store.remove(&names(id))?,
            }
        }
        Ok(families)
    }

    fn has_ended(&self) -> bool {
        false
    }

    fn watched(&self) -> Option<OwnedFd> {
        None
    }

    fn hold(&mut self, id: Uuid, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let wanted = self.families.values().sum::<usize>() + files.len();
        if wanted > self.manager.max {
            let why =
                format!("the service needs FileDescriptorStoreMax={wanted}, and has {}", self.manager.max);
            return Err(io::Error::other(why));
        }
        let named = (0..).zip(files).map(|(number, file)| (name_of(id, number), *file));
        let mut named: Vec<_> = named.collect();
        named.reverse();
        self.manager.store.store(&named)?;
        self.families.insert(id, files.len());
        Ok(())
    }

    fn release(&mut self, id: Uuid) -> io::Result<()> {
        self.manager.store.remove(&names(id))?;
        self.families.remove(&id);
        Ok(())
    }

    fn stored_names(&self, id: Uuid) -> Option<Vec<String>> {
        Some(names(id))
    }

    fn leave(&mut self) {}
}

fn names(id: Uuid) -> Vec<String> {
    (0..*FILES.end()).map(|number| name_of(id, number)).collect()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::sync::{Arc, Mutex};

    use super::*;

    type Stored = Arc<Mutex<Vec<(String, OwnedFd)>>>;

    struct Manager(Stored);

    impl DescriptorStore for Manager {
        fn store(&self, descriptors: &[(String, BorrowedFd<'_>)]) -> io::Result<()> {
            let copies =
                descriptors.iter().map(|(name, file)| (name.clone(), file.try_clone_to_owned().unwrap()));
            self.0.lock().unwrap().extend(copies);
            Ok(())
        }

        fn remove(&self, names: &[String]) -> io::Result<()> {
            self.0.lock().unwrap().retain(|(name, _)| !names.contains(name));
            Ok(())
        }
    }

    fn holder(stored: &Stored) -> ManagerHolder {
        let copies = stored.lock().unwrap();
        let copies = copies.iter().map(|(name, file)| (name.clone(), file.try_clone().unwrap()));
        let stored = Arc::clone(stored);
        ManagerHolder::new(ServiceManager {
            stored: copies.collect(),
            store: Box::new(Manager(stored)),
            max: 9,
        })
    }

    #[test]
    fn next_server_finds_complete_families() {
        let stored = Stored::default();
        let mut first = holder(&stored);
        assert!(first.connect().unwrap().is_empty());
        let file = tempfile::tempfile().unwrap();
        let files = [file.as_fd(); 5];
        let [a, b, c] = [(); 3].map(|()| Uuid::new_v4());
        first.hold(a, &files[..4]).unwrap();
        first.hold(b, &files).unwrap();
        let error = first.hold(c, &files).unwrap_err().to_string();
        assert_eq!(error, "the service needs FileDescriptorStoreMax=14, and has 9");
        first.release(a).unwrap();
        first.hold(c, &files[..4]).unwrap();
        assert!(stored.lock().unwrap().iter().all(|(name, _)| is_family_file(name)));
        // The manager has only a part of a family's files.
        stored.lock().unwrap().pop();
        let mut second = holder(&stored);
        let found = second.connect().unwrap();
        assert_eq!(
            found.iter().map(|(id, files)| (*id, files.backing.is_some())).collect::<Vec<_>>(),
            [(b, true)]
        );
        assert_eq!(stored.lock().unwrap().len(), 5);
        for other in ["freestone.socket", "freestone-x-1", &format!("{PREFIX}{}-5", a.simple())] {
            assert!(!is_family_file(other), "{other}");
        }
    }
}
