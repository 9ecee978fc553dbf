//! A device with its name, and what it stands on.

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, TryLockError, Weak};

use freestone::cow;
use freestone::device::{self, Device};
use freestone::file::{Changed, File};
use freestone::null::Memory;
use freestone::qcow2::Image;
use freestone::ram::{Family, Ram, SetupError};

use crate::layers::Layers;
use crate::spec::{ForkSpec, KindSpec, Spec};

/// A device of one of the kinds, for what is not the same for all of them.
pub enum Kind {
    /// A compressed RAM disk.
    Ram(Arc<Ram>),
    /// A disk over a base.
    Fork(Arc<Ram>),
    /// What a RAM disk or fork held at one moment.
    Snapshot(Arc<Ram>),
    /// What a file held at one moment, as dm-snapshot keeps it.
    Cow(cow::Snapshot),
    /// A fork for every connection; the number of those that were made.
    Template(AtomicU64),
    /// A test drive, with what holds its data.
    Null(NullData),
    /// A raw image or a block device. One that is written knows its snapshots.
    File(Arc<File>, Option<cow::Origin>),
    /// A qcow2 image.
    Qcow2(Arc<Image>),
}

/// What holds the data of a null device.
pub enum NullData {
    /// Writes vanish, reads are zeroes.
    Nothing,
    /// `memory_backed=1`.
    Memory(Arc<Memory>),
    /// The same with `comp_algorithm`.
    Compressed(Arc<Ram>),
}

/// A device with its name.
pub struct Entry {
    /// As it was asked for; what can change later is asked of the device.
    pub spec: Spec,
    /// The device.
    pub kind: Kind,
    /// The template, where this was made for one of its connections. It goes with that.
    pub template: Option<String>,
    /// What lies over its data.
    pub layers: Layers,
    /// As exports see it, with its layers; a template has none.
    device: Option<Arc<dyn Device>>,
    /// What has to be there as long as this is.
    needs: Vec<Arc<Entry>>,
    /// What the forks of a base share, from the first one on. Locked also while it is made.
    pub family: Mutex<Option<Family>>,
    /// How often a fork was set back to its base.
    pub rewinds: AtomicU64,
    /// Of a snapshot in memory: its origin, and how often that had been rewound.
    pub origin: Option<(Weak<Entry>, u64)>,
}

impl Entry {
    /// A device that stands on others, or on nothing.
    pub fn new(spec: Spec, kind: Kind, device: Option<Arc<dyn Device>>, needs: Vec<Arc<Entry>>) -> Self {
        Self {
            spec,
            kind,
            template: None,
            layers: Layers::default(),
            device,
            needs,
            family: Mutex::default(),
            rewinds: AtomicU64::new(0),
            origin: None,
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
            Kind::Fork(_) => "fork",
            Kind::Snapshot(_) | Kind::Cow(_) => "snapshot",
            Kind::Template(_) => "template",
            Kind::Null(_) => "null",
            Kind::File(..) => "file",
            Kind::Qcow2(_) => "qcow2",
        }
    }

    /// The device as exports see it. A template has none.
    pub fn device(&self) -> Option<&Arc<dyn Device>> {
        self.device.as_ref()
    }

    /// Its size in bytes; of a template that of its forks.
    pub fn size(&self) -> u64 {
        match (&self.device, self.fork_spec()) {
            (Some(device), _) => device.geometry().size,
            (None, Some(ForkSpec { size: Some(size), .. })) => *size,
            (None, _) => self.needs.first().map_or(0, |base| base.size()),
        }
    }

    /// Whether it takes no writes, from anybody.
    pub fn is_read_only(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.geometry().read_only)
    }

    /// What has to be there as long as this is.
    pub fn needs(&self) -> &[Arc<Entry>] {
        &self.needs
    }

    /// Disk, fork or snapshot in memory.
    pub fn ram(&self) -> Option<&Arc<Ram>> {
        match &self.kind {
            Kind::Ram(ram) | Kind::Fork(ram) | Kind::Snapshot(ram) => Some(ram),
            _ => None,
        }
    }

    /// What forks are made of, for a fork or template.
    pub fn fork_spec(&self) -> Option<&ForkSpec> {
        match &self.spec.kind {
            KindSpec::Fork(fork) => Some(fork),
            KindSpec::Template(template) => Some(&template.fork),
            _ => None,
        }
    }

    /// The name of what it shows where it holds nothing itself.
    pub fn below(&self) -> Option<&str> {
        match &self.spec.kind {
            KindSpec::Snapshot(snapshot) => Some(&snapshot.origin),
            KindSpec::Restored { base, .. } => base.as_deref(),
            _ => self.fork_spec().map(|fork| fork.base.as_str()),
        }
    }

    /// Sets its data back to what it was in the beginning, nothing or the base of a fork; on request the counters of a
    /// RAM disk or fork as well.
    pub fn wipe_data(&self, counters: bool) -> device::Result<()> {
        let done = match &self.kind {
            Kind::Ram(ram) | Kind::Fork(ram) | Kind::Null(NullData::Compressed(ram)) => {
                if counters {
                    ram.reset()
                } else {
                    ram.rewind()
                }
            }
            Kind::Null(NullData::Nothing) => Ok(()),
            Kind::Null(NullData::Memory(memory)) => return memory.reset(),
            _ => return Err(device::Error::Unsupported),
        };
        done.map_err(|error| match error {
            SetupError::NoMemory => device::Error::NoMemory,
            _ => device::Error::Unsupported,
        })
    }

    /// Whether forks can be made of it, each with a family that is not its own.
    pub fn is_outer_base(&self) -> bool {
        match self.kind {
            Kind::File(..) | Kind::Cow(_) => self.is_read_only(),
            Kind::Qcow2(_) => true,
            _ => false,
        }
    }

    /// Which of the files of a base is not what it was when it was opened, as of the last look, and what became of it.
    pub fn changed(&self) -> Option<(PathBuf, Changed)> {
        match &self.kind {
            Kind::File(file, _) => Some((file.path().to_owned(), file.changed()?)),
            Kind::Qcow2(image) => image.changed(),
            _ => None,
        }
    }

    /// Its family, or that of its forks, if there is one already.
    pub fn family_made(&self) -> Option<Family> {
        match self.ram() {
            Some(ram) => Some(ram.family()),
            // While it is made, which may wait for its backing device, there is none yet.
            None => match self.family.try_lock() {
                Ok(family) => family.clone(),
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().clone(),
                Err(TryLockError::WouldBlock) => None,
            },
        }
    }
}
