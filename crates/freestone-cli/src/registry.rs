//! The devices of a server by name.

use std::fmt::Display;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use freestone::codec::Params;
use freestone::device::Device;
use freestone::file::{self, File};
use freestone::null::{self, Null};
use freestone::ram::{self, BackingDev, Ram, Secondary};

use crate::control::protocol::Errno;
use crate::machine;
use crate::size::exact;
use crate::spec::{KindSpec, RamSpec, Spec};

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
    /// Sets the device up.
    pub fn build(spec: Spec) -> Result<Self, BuildError> {
        let kind = match &spec.kind {
            KindSpec::Ram(ram) => build_ram(ram).map(|ram| Kind::Ram(Arc::new(ram))),
            KindSpec::Null { size, blocksize } => {
                let config = null::Config { size: *size, logical_block: *blocksize };
                let null = Null::new(config).map_err(|e| BuildError::new(Errno::EIO, &e));
                null.map(|null| Kind::Null(Arc::new(null)))
            }
            KindSpec::File { path, readonly, direct, size } => {
                let mut config = file::Config::new(path);
                (config.read_only, config.direct, config.size) = (*readonly, *direct, *size);
                let file = File::open(&config)
                    .map_err(|e| BuildError::new(errno_of(&e), &in_typed_sizes("size", &e)));
                file.map(|file| Kind::File(Arc::new(file)))
            }
        };
        match kind {
            Ok(kind) => Ok(Self { spec, kind }),
            Err(BuildError { errno, sentence }) => {
                Err(BuildError { errno, sentence: format!("{}: {sentence}", spec.name) })
            }
        }
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

/// Why a device could not be set up: it is about the machine, not about the values.
#[derive(Debug, PartialEq, Eq)]
pub struct BuildError {
    /// For programs.
    pub errno: Errno,
    /// For people; names the device.
    pub sentence: String,
}

impl BuildError {
    fn new(errno: Errno, why: &dyn Display) -> Self {
        Self { errno, sentence: why.to_string() }
    }
}

fn build_ram(spec: &RamSpec) -> Result<Ram, BuildError> {
    let params = |words: &str| {
        Params::parse(words).map_err(|e| BuildError::new(Errno::EIO, &format!("algorithm_params: {e}")))
    };
    let mem_limit = match spec.mem_limit {
        Some(bytes) => bytes,
        None => machine::half_of_memory().map_err(|e| BuildError::new(Errno::EIO, &format!("{e:#}")))?,
    };
    let mut config = ram::Config {
        disksize: spec.disksize,
        comp_algorithm: spec.comp_algorithm,
        algorithm_params: params(&spec.algorithm_params)?,
        mem_limit,
        auto_recompress: spec.auto_recompress,
        ..ram::Config::default()
    };
    for (secondary, asked) in config.recomp_algorithms.iter_mut().zip(&spec.recomp_algorithms) {
        if let Some(asked) = asked {
            *secondary = Some(Secondary { algorithm: asked.algorithm, params: params(&asked.params)? });
        }
    }
    config.backing = spec.backing.as_ref().map(|backing| BackingDev {
        path: backing.path.clone(),
        size: backing.size,
        compressed_writeback: backing.compressed,
    });
    let ram = Ram::new(config).map_err(|e| match e {
        ram::SetupError::Backing(e) => {
            BuildError::new(errno_of(&e), &format!("backing_dev: {}", in_typed_sizes("backing_size", &e)))
        }
        ram::SetupError::NoMemory => BuildError::new(Errno::ENOMEM, &e),
        e => BuildError::new(Errno::EIO, &e),
    })?;
    if let Some(backing) = &spec.backing {
        ram.set_writeback_limit(backing.limit);
        ram.set_writeback_limit_enable(backing.limit_enable);
        if let Some(pages) = backing.batch_size {
            ram.set_writeback_batch_size(pages);
        }
    }
    Ok(ram)
}

fn errno_of(error: &file::SetupError) -> Errno {
    match error {
        file::SetupError::InUse { .. } => Errno::EBUSY,
        file::SetupError::Call { source, .. } => match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                Errno::ENOSPC
            }
            _ => Errno::EIO,
        },
        _ => Errno::EIO,
    }
}

/// The library says sizes in bytes; here they are typed with units, under `key`.
fn in_typed_sizes(key: &str, error: &file::SetupError) -> String {
    match error {
        file::SetupError::SizeDiffers { path, found, asked } => {
            let (path, found, asked) = (path.display(), exact(*found), exact(*asked));
            format!("{key}={asked}: {path} has {found}; leave {key} out to take the file as it is")
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
        let error = Entry::build("f=file,path=/nowhere/at/all".parse().unwrap()).err().unwrap().sentence;
        assert!(error.starts_with("f: ") && error.contains("/nowhere/at/all"), "{error}");
        let dict = "r=ram,disksize=1M,comp_algorithm=zstd,algorithm_params=level=3 dict=/nowhere/d";
        let error = Entry::build(dict.parse().unwrap()).err().unwrap().sentence;
        let missing = "r: algorithm_params: dict=/nowhere/d: No such file or directory (os error 2)";
        assert_eq!(error, missing);

        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let path = file.path().display();
        let error =
            Entry::build(format!("f=file,path={path},size=1G").parse().unwrap()).err().unwrap().sentence;
        let differs = format!("f: size=1G: {path} has 8K; leave size out to take the file as it is");
        assert_eq!(error, differs);
    }
}
