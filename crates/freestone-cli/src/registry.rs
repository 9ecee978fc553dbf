//! The devices of a server by name.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use freestone::codec::Params;
use freestone::device::Device;
use freestone::file::{self, File};
use freestone::null::{self, Null};
use freestone::ram::{self, Ram};

use crate::machine;
use crate::size::exact;
use crate::spec::{KindSpec, Spec};

/// Most devices of one server.
pub const MAX_DEVICES: usize = 65_536;

/// A device of one of the kinds, for what is not the same for all of them.
#[derive(Clone)]
pub enum Kind {
    /// A compressed RAM disk.
    Ram(Arc<Ram>),
    /// Writes vanish, reads are zeroes.
    Null(Arc<Null>),
    /// A raw image or a block device.
    File(Arc<File>),
}

/// A device with its name.
pub struct Entry {
    /// As it was asked for; what can change later is asked of the device.
    pub spec: Spec,
    /// The device.
    pub kind: Kind,
}

impl Entry {
    /// Sets the device up. The error is one sentence that names it; it is about the machine, not about the values.
    pub fn build(spec: Spec) -> Result<Self, String> {
        let failed = |why: &dyn std::fmt::Display| format!("{}: {why}", spec.name);
        let kind = match &spec.kind {
            KindSpec::Ram { disksize, comp_algorithm, algorithm_params, mem_limit } => {
                let mem_limit = match mem_limit {
                    Some(bytes) => *bytes,
                    None => machine::half_of_memory().map_err(|e| failed(&format!("{e:#}")))?,
                };
                let params = Params::parse(algorithm_params);
                let config = ram::Config {
                    disksize: *disksize,
                    comp_algorithm: *comp_algorithm,
                    algorithm_params: params.map_err(|e| failed(&format!("algorithm_params: {e}")))?,
                    mem_limit,
                };
                Kind::Ram(Arc::new(Ram::new(config).map_err(|e| failed(&e))?))
            }
            KindSpec::Null { size, blocksize } => {
                let config = null::Config { size: *size, logical_block: *blocksize };
                Kind::Null(Arc::new(Null::new(config).map_err(|e| failed(&e))?))
            }
            KindSpec::File { path, readonly, direct, size } => {
                let mut config = file::Config::new(path);
                (config.read_only, config.direct, config.size) = (*readonly, *direct, *size);
                Kind::File(Arc::new(File::open(&config).map_err(|e| failed(&in_typed_sizes(e)))?))
            }
        };
        Ok(Self { spec, kind })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The name of its kind.
    pub fn kind_name(&self) -> &'static str {
        match self.kind {
            Kind::Ram(_) => "ram",
            Kind::Null(_) => "null",
            Kind::File(_) => "file",
        }
    }

    /// The device as exports see it.
    pub fn device(&self) -> Arc<dyn Device> {
        match &self.kind {
            Kind::Ram(ram) => Arc::clone(ram) as Arc<dyn Device>,
            Kind::Null(null) => Arc::clone(null) as Arc<dyn Device>,
            Kind::File(file) => Arc::clone(file) as Arc<dyn Device>,
        }
    }
}

/// The library says sizes in bytes; here they are typed with units.
fn in_typed_sizes(error: file::SetupError) -> String {
    match error {
        file::SetupError::SizeDiffers { path, found, asked } => {
            let (path, found, asked) = (path.display(), exact(found), exact(asked));
            format!("size={asked}: {path} has {found}; leave size out to take the file as it is")
        }
        other => other.to_string(),
    }
}

/// Why a device was not added.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// There is one of that name.
    Duplicate,
    /// [`MAX_DEVICES`] are there.
    Full,
}

/// Devices in the order in which they came. One lock, held to look up or to list, never during work on a
/// device.
#[derive(Default)]
pub struct Registry {
    entries: Mutex<Vec<Arc<Entry>>>,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Entry>>> {
        // A push or a removal is whole or did not happen.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device of that name.
    pub fn find(&self, name: &str) -> Option<Arc<Entry>> {
        self.lock().iter().find(|e| e.name() == name).cloned()
    }

    /// All devices.
    pub fn all(&self) -> Vec<Arc<Entry>> {
        self.lock().clone()
    }

    /// Whether a device of that name would be taken.
    pub fn check_free(&self, name: &str) -> Result<(), Refused> {
        let entries = self.lock();
        if entries.iter().any(|e| e.name() == name) {
            return Err(Refused::Duplicate);
        }
        if entries.len() >= MAX_DEVICES { Err(Refused::Full) } else { Ok(()) }
    }

    /// Adds a device under a name that [`check_free`](Self::check_free) allowed; the caller lets nobody in
    /// between.
    pub fn add(&self, entry: Arc<Entry>) {
        self.lock().push(entry);
    }

    /// Takes a device out.
    pub fn remove(&self, name: &str) {
        self.lock().retain(|e| e.name() != name);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Entry, Refused, Registry};

    fn entry(text: &str) -> Arc<Entry> {
        Arc::new(Entry::build(text.parse().unwrap()).unwrap())
    }

    #[test]
    fn names_are_unique_and_order_is_kept() {
        let registry = Registry::default();
        for text in ["b=null,size=1M", "a=ram,disksize=1M", "c=null,size=1M"] {
            let entry = entry(text);
            assert_eq!(registry.check_free(entry.name()), Ok(()));
            registry.add(entry);
        }
        assert_eq!(registry.check_free("a"), Err(Refused::Duplicate));
        registry.remove("b");
        let names: Vec<_> = registry.all().iter().map(|e| e.name().to_owned()).collect();
        assert_eq!(names, ["a", "c"]);
        assert_eq!(registry.find("a").unwrap().kind_name(), "ram");
        assert!(registry.find("b").is_none());
    }

    #[test]
    fn what_cannot_be_set_up_is_named() {
        let error = Entry::build("f=file,path=/nowhere/at/all".parse().unwrap()).err().unwrap();
        assert!(error.starts_with("f: ") && error.contains("/nowhere/at/all"), "{error}");
        let dict = "r=ram,disksize=1M,comp_algorithm=zstd,algorithm_params=level=3 dict=/nowhere/d";
        let error = Entry::build(dict.parse().unwrap()).err().unwrap();
        let missing = "r: algorithm_params: dict=/nowhere/d: No such file or directory (os error 2)";
        assert_eq!(error, missing);

        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let path = file.path().display();
        let error = Entry::build(format!("f=file,path={path},size=1G").parse().unwrap()).err().unwrap();
        let differs = format!("f: size=1G: {path} has 8K; leave size out to take the file as it is");
        assert_eq!(error, differs);
    }
}
