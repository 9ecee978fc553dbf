//! The service manager as the holder: systemd's store of descriptors (`FileDescriptorStoreMax=`), which outlives a
//! killed service until it is stopped.
//!
//! Each file has a name of its own: the prefix, the family and the number of the file. The manager does not
//! acknowledge a descriptor, so the limit of the store is checked here.

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use uuid::Uuid;

use super::holder::{HeldFiles, Holder};
use super::messages::FILES;

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
    let number = number.parse().ok().filter(|number| *number < FILES)?;
    Some((Uuid::try_parse(id).ok()?, number))
}

fn name_of(id: Uuid, number: usize) -> String {
    format!("{PREFIX}{}-{number}", id.simple())
}

/// The holder, which has the families in the store.
pub(super) struct ManagerHolder {
    manager: ServiceManager,
    /// Number of families in the store.
    families: usize,
}

impl ManagerHolder {
    pub fn new(manager: ServiceManager) -> Self {
        Self { manager, families: 0 }
    }
}

impl Holder for ManagerHolder {
    fn connect(&mut self) -> io::Result<Vec<HeldFiles>> {
        let mut found: HashMap<Uuid, [Option<OwnedFd>; FILES]> = HashMap::new();
        for (name, file) in self.manager.stored.drain(..) {
            if let Some((id, number)) = parse(&name) {
                found.entry(id).or_default()[number] = Some(file);
            }
        }
        let mut families = Vec::new();
        for (id, files) in found {
            match files {
                [Some(a), Some(b), Some(c), Some(d)] => families.push((id, [a, b, c, d])),
                // The server was killed before the manager had all files, and before clients had the device.
                _ => self.manager.store.remove(&names(id))?,
            }
        }
        self.families = families.len();
        Ok(families)
    }

    fn has_ended(&self) -> bool {
        false
    }

    fn watched(&self) -> Option<OwnedFd> {
        None
    }

    fn hold(&mut self, id: Uuid, files: &[BorrowedFd<'_>; FILES]) -> io::Result<()> {
        let wanted = (self.families + 1) * FILES;
        if wanted > self.manager.max {
            let why =
                format!("the service needs FileDescriptorStoreMax={wanted}, and has {}", self.manager.max);
            return Err(io::Error::other(why));
        }
        let named: Vec<_> = (0..).zip(files).map(|(number, file)| (name_of(id, number), *file)).collect();
        self.manager.store.store(&named)?;
        self.families += 1;
        Ok(())
    }

    fn release(&mut self, id: Uuid) -> io::Result<()> {
        self.manager.store.remove(&names(id))?;
        self.families = self.families.saturating_sub(1);
        Ok(())
    }

    fn leave(&mut self) {}
}

fn names(id: Uuid) -> Vec<String> {
    (0..FILES).map(|number| name_of(id, number)).collect()
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
        let files = [file.as_fd(); FILES];
        let [a, b, c] = [(); 3].map(|()| Uuid::new_v4());
        first.hold(a, &files).unwrap();
        first.hold(b, &files).unwrap();
        let error = first.hold(c, &files).unwrap_err().to_string();
        assert_eq!(error, "the service needs FileDescriptorStoreMax=12, and has 9");
        first.release(a).unwrap();
        first.hold(c, &files).unwrap();
        assert!(stored.lock().unwrap().iter().all(|(name, _)| is_family_file(name)));
        // The manager has only a part of a family's files.
        stored.lock().unwrap().pop();
        let mut second = holder(&stored);
        let found: Vec<_> = second.connect().unwrap().into_iter().map(|(id, _)| id).collect();
        assert_eq!(found, [b]);
        assert_eq!(stored.lock().unwrap().len(), FILES);
        for other in ["freestone.socket", "freestone-x-1", &format!("{PREFIX}{}-4", a.simple())] {
            assert!(!is_family_file(other), "{other}");
        }
    }
}
