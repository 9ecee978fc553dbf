//! Kinds of devices.
//!
//! Each kind has a module with its keys, their parsing, its setup and its attributes, behind the
//! traits [`KindConfig`] and [`KindInstance`]. This module has the common part: [`Spec`] is the
//! specification of a device, [`Entry`] a device that exists. [`registry`] has the devices by name.

mod ahead;
mod build;
mod check_size;
mod counters;
mod exclusive;
mod file;
mod fork;
mod identity;
mod image;
mod limits;
mod names;
mod nbd;
mod null;
mod qcow2;
mod ram;
#[cfg(feature = "rbd")]
mod rbd;
pub mod registry;
mod restored;
mod shared_family;
mod snapshot;
mod template;
#[cfg(test)]
mod tests;
mod wipe;
mod words;

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, Weak};

use freestone::cow;
use freestone::device::{self, Counting, Device, Failures, Sum, Tally};
use freestone::file::Changed;
use freestone::places::Places;
use freestone::qcow2::Format;
use freestone::ram::{Family, Ram};
use freestone_nbd_client::Uri;
use serde_json::Value;

use self::ahead::Opener;
pub use self::ahead::{Ahead, OpenAhead};
pub use self::build::build;
use self::build::{Built, finish_entry, warn_of_record};
pub use self::exclusive::ExclusiveUse;
pub use self::file::FileSpec;
pub use self::fork::{ForkSpec, over_stat};
use self::identity::parse_on_lost;
pub use self::identity::{Identity, OnLost, RESTART_KEYS, RestartPolicy};
pub use self::image::{ImageSpec, Pulled, of_store};
pub use self::limits::NoWaiting;
pub use self::names::RESTORED;
use self::names::{IS_SNAPSHOT, LAYER_KEYS, is_live, parse_name};
pub use self::nbd::NbdSpec;
pub use self::null::{NullBacking, NullData, NullSpec};
pub use self::qcow2::Qcow2Spec;
pub use self::ram::{
    Change, RamSpec, auto_recompressed, backing, bd_stat, debug_stat, full_stat, io_stat, mm_stat,
};
#[cfg(feature = "rbd")]
pub use self::rbd::RbdSpec;
use self::registry::Registry;
pub use self::restored::{RestoredSpec, Said, StandsOn, kept, restored};
pub use self::snapshot::{
    CowDevice, CowPlace, CowSpec, CutOutcome, SnapshotSpec, Stack, cow_stat, merge, missed_writes, snapshots,
};
pub use self::template::TemplateSpec;
use self::words::Words;
use crate::entries::{Entries, SpecError, a_kind, nearest};
use crate::family::FamilySpec;
use crate::keys::{Keys, parse_bool};
use crate::layers::{DataInfo, LayerSpec, Layers};
use crate::limits::LimitSpec;
use crate::notes::MemoryNotes;
use crate::refusal::{Errno, Refusal};
use crate::tls::TlsClients;

/// Parses the keys of a kind.
type Take = fn(&Keys) -> Result<KindSpec, SpecError>;

/// Number of kinds.
const COUNT: usize = 9 + cfg!(feature = "rbd") as usize;
/// Every kind that can be specified.
const ALL: [(&str, Take); COUNT] = [
    (ram::NAME, |keys| Ok(KindSpec::Ram(Box::new(RamSpec::take(keys)?)))),
    (fork::NAME, |keys| Ok(KindSpec::Fork(ForkSpec::take(keys)?))),
    (snapshot::NAME, |keys| Ok(KindSpec::Snapshot(Box::new(SnapshotSpec::take(keys)?)))),
    (template::NAME, |keys| Ok(KindSpec::Template(TemplateSpec::take(keys)?))),
    (null::NAME, |keys| Ok(KindSpec::Null(Box::new(NullSpec::take(keys)?)))),
    (file::NAME, |keys| Ok(KindSpec::File(Box::new(FileSpec::take(keys)?)))),
    (qcow2::NAME, |keys| Ok(KindSpec::Qcow2(Box::new(Qcow2Spec::take(keys)?)))),
    (image::NAME, |keys| Ok(KindSpec::Image(Box::new(ImageSpec::take(keys)?)))),
    (nbd::NAME, |keys| Ok(KindSpec::Nbd(Box::new(NbdSpec::take(keys)?)))),
    #[cfg(feature = "rbd")]
    (rbd::NAME, |keys| Ok(KindSpec::Rbd(Box::new(RbdSpec::take(keys)?)))),
];
/// Names of the kinds.
pub const KINDS: [&str; ALL.len()] = {
    let (mut names, mut at) = ([""; ALL.len()], 0);
    while at < names.len() {
        names[at] = ALL[at].0;
        at += 1;
    }
    names
};

// ---- specifications -----------------------------------------------------------------------------

/// Specification of a device. Every value is checked, but nothing is opened.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// Name.
    pub name: String,
    /// Words of the specification, as they were typed.
    pub words: Entries,
    /// Publish the device on the addresses of `serve`; None for the default.
    pub publish: Option<bool>,
    /// NBD clients that may use the device; None for all.
    pub tls_clients: Option<TlsClients>,
    /// What a restart does with the exports if the content is lost; None for the default.
    pub on_lost: Option<OnLost>,
    /// The content is saved in the state directory of the server.
    pub keep: bool,
    /// Kind, with its keys.
    pub kind: KindSpec,
    /// Layers over the data.
    pub layers: LayerSpec,
    /// I/O and connection limits.
    pub limits: LimitSpec,
}

/// Specification of each kind.
#[derive(Debug, Clone, PartialEq)]
pub enum KindSpec {
    /// A compressed RAM disk.
    Ram(Box<RamSpec>),
    /// A disk over a base.
    Fork(ForkSpec),
    /// A snapshot of a device.
    Snapshot(Box<SnapshotSpec>),
    /// A template: each connection gets a fork of its own.
    Template(TemplateSpec),
    /// A test drive, like `null_blk`.
    Null(Box<NullSpec>),
    /// A raw image or a block device.
    File(Box<FileSpec>),
    /// A qcow2 image, read-only.
    Qcow2(Box<Qcow2Spec>),
    /// An image in object storage, read-only.
    Image(Box<ImageSpec>),
    /// An export of an NBD server.
    Nbd(Box<NbdSpec>),
    /// An image in Ceph's RBD.
    #[cfg(feature = "rbd")]
    Rbd(Box<RbdSpec>),
    /// A device from a saved file.
    Restored(RestoredSpec),
}

impl Deref for KindSpec {
    type Target = dyn KindConfig;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Ram(spec) => &**spec,
            Self::Fork(spec) => spec,
            Self::Snapshot(spec) => &**spec,
            Self::Template(spec) => spec,
            Self::Null(spec) => &**spec,
            Self::File(spec) => &**spec,
            Self::Qcow2(spec) => &**spec,
            Self::Image(spec) => &**spec,
            Self::Nbd(spec) => &**spec,
            #[cfg(feature = "rbd")]
            Self::Rbd(spec) => &**spec,
            Self::Restored(spec) => spec,
        }
    }
}

/// Specification of a kind. The default methods fit most kinds.
pub trait KindConfig {
    /// Opens the device, without its layers. The devices it depends on are in the registry. The error
    /// does not name the device.
    fn build(&self, spec: &Spec, registry: &Registry) -> Result<Built, Refusal>;

    /// Returns a function that opens the device before its turn, if the device is remote.
    fn opener(&self, _: &Spec) -> Option<Opener> {
        None
    }

    /// Returns the family of the device, its snapshots and their forks, or that of its forks.
    fn family(&self) -> Option<&FamilySpec> {
        None
    }

    /// Returns the specified size in bytes.
    fn size(&self) -> Option<u64> {
        None
    }

    /// Returns true if the device is specified as read-only.
    fn is_read_only(&self) -> bool {
        false
    }

    /// Returns the specification of a fork, or of the forks of a template.
    fn fork(&self) -> Option<&ForkSpec> {
        None
    }

    /// Returns the name of the base of a fork or template, or of the origin of a snapshot.
    fn below(&self) -> Option<&str> {
        None
    }

    /// Returns the name of the COW device of a snapshot, if it is a device of the server.
    fn copies_to(&self) -> Option<&str> {
        None
    }

    /// Returns the devices of which this device needs exclusive use.
    fn takes(&self) -> Vec<ExclusiveUse<'_>> {
        self.family().and_then(ExclusiveUse::pages).into_iter().collect()
    }

    /// Returns the devices that must not be rewound, merged or published while this device is created.
    fn changes(&self) -> Vec<&str> {
        self.takes().iter().map(|takes| takes.name).collect()
    }

    /// Returns the path and format of an image file, with which a delta names its base.
    fn image(&self) -> Option<(&Path, Format)> {
        None
    }

    /// Returns the URI of an export of an NBD server.
    fn uri(&self) -> Option<&Uri> {
        None
    }

    /// Returns true if the kind's data is in memory; see [`Spec::is_lost`].
    fn is_lost(&self) -> bool {
        false
    }

    /// Returns the properties of the data that its layers need.
    fn data_info(&self) -> DataInfo<'_> {
        DataInfo::default()
    }
}

impl FromStr for Spec {
    type Err = SpecError;
    fn from_str(text: &str) -> Result<Self, SpecError> {
        Self::from_entries(Entries::parse(text)?)
    }
}

impl Spec {
    /// Checks the kind, the keys and the values.
    pub fn from_entries(entries: Entries) -> Result<Self, SpecError> {
        let (words, mut entries) = (entries.clone(), entries);
        let limits = LimitSpec::take(&mut entries)?;
        let keys = Keys(entries);
        let Some((_, take)) = ALL.iter().find(|(name, _)| *name == keys.0.kind) else {
            let Entries { name, kind, .. } = keys.0;
            let hint = nearest(&kind, &KINDS);
            return Err(SpecError::Kind { name, kind, hint, kinds: &KINDS });
        };
        let kind = take(&keys)?;
        let publish = keys.take("publish", parse_bool)?;
        let tls_clients = keys.take("tls_clients", TlsClients::parse)?;
        let on_lost = keys.take("on_lost", parse_on_lost)?;
        let layers = LayerSpec::take(&keys)?;
        let is_file = kind.data_info().file.is_some();
        layers.check(&keys, kind.size(), kind.is_read_only(), is_file)?;
        let keep = keys.take("keep", parse_bool)?.unwrap_or(false);
        let name = keys.0.name.clone();
        let spec = Self { name, words, publish, tls_clients, on_lost, keep, kind, layers, limits };
        if on_lost.is_some() && !spec.is_lost() && spec.kind.below().is_none() {
            return Err(keys.refuse("on_lost", "its content does not end with the server"));
        }
        if let (true, Some(why)) = (keep, spec.why_not_kept()) {
            return Err(keys.refuse("keep", why));
        }
        Ok(spec)
    }

    /// Returns the reason why the content cannot be saved in the state directory, or None.
    fn why_not_kept(&self) -> Option<&'static str> {
        let cow = matches!(&self.kind, KindSpec::Snapshot(snapshot) if snapshot.cow.is_some());
        if cow {
            return Some("its content is on its COW device");
        }
        if self.layers.zones.is_some() {
            return Some("not with zoned=1: the conditions of zones would be lost");
        }
        let unflushed = self.layers.power_cut || self.layers.record.is_some();
        unflushed.then_some("not with power_cut=yes or record: what is not flushed would be lost")
    }

    /// Returns true if both specify the same device.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.kind, &self.layers, &self.tls_clients, self.on_lost, self.keep, self.limits)
            == (&other.kind, &other.layers, &other.tls_clients, other.on_lost, other.keep, other.limits)
    }

    /// Returns true if the content of the device, or its zone state, is in memory and ends with the
    /// server.
    pub fn is_lost(&self) -> bool {
        self.kind.is_lost() || (self.layers.zones.is_some() && self.kind.data_info().file.is_none())
    }
}

// ---- devices of a kind --------------------------------------------------------------------------

/// The kind-specific part of an open device. The default methods fit most kinds.
pub trait KindInstance: Send + Sync {
    /// Returns the name of the kind.
    fn name(&self) -> &'static str;

    /// Returns a RAM disk, fork or snapshot in memory.
    fn ram(&self) -> Option<&Arc<Ram>> {
        None
    }

    /// Returns a fork.
    fn fork(&self) -> Option<&Arc<Ram>> {
        None
    }

    /// Returns a snapshot in memory.
    fn memory_snapshot(&self) -> Option<&Arc<Ram>> {
        None
    }

    /// Returns a snapshot with a store on a COW device.
    fn cow(&self) -> Option<&cow::Snapshot> {
        None
    }

    /// Returns the RAM disk with the copies of a snapshot without a COW device.
    fn copies(&self) -> Option<&Ram> {
        None
    }

    /// Returns the device with the copies of a snapshot.
    fn cow_device(&self) -> Option<&CowDevice> {
        None
    }

    /// Returns the family that began with this device.
    fn own_family(&self) -> Option<Family> {
        None
    }

    /// Checks that the device can be an origin or a COW device. The error continues a sentence about it.
    fn check_origin(&self) -> Result<(), &'static str>;

    /// Returns the storage of an origin's notes.
    fn notes(&self) -> Box<dyn cow::Notes> {
        Box::<MemoryNotes>::default()
    }

    /// Checks that the device can be the base of a fork. The error continues a sentence about it.
    fn check_base(&self, base: &Entry) -> Result<(), String>;

    /// Returns true if the device can be a base outside of the family of its forks.
    fn is_outer_base(&self, _read_only: bool) -> bool {
        false
    }

    /// Returns the file of a base and its change, if the last check found that it changed since it was
    /// opened.
    fn changed(&self) -> Option<(PathBuf, Changed)> {
        None
    }

    /// Returns the files of a base, each with an identity that a change of the file changes.
    fn file_identities(&self) -> Vec<(PathBuf, String)> {
        Vec::new()
    }

    /// Returns true if [`wipe`](Self::wipe) is supported.
    fn can_wipe(&self) -> bool {
        false
    }

    /// Resets the data to its initial content, and on request the counters of a RAM disk or fork.
    fn wipe(&self, _counters: bool) -> device::Result<()> {
        Err(device::Error::Unsupported)
    }

    /// Returns true if [`wipe`](Self::wipe) would not change the content. On request, resets counters.
    fn skip_wipe(&self, _counters: bool) -> bool {
        false
    }

    /// Begins the merge that `merge=yes` requests, or continues one. The origin then shows its result.
    fn begin_merge(&self, _entry: &Arc<Entry>, _registry: &Registry) -> Result<(), Refusal> {
        Ok(())
    }

    /// Returns the message for an origin with an unfinished merge.
    fn half_merged_message(&self, _name: &str) -> String {
        "an unfinished merge left it half old, half new; open the snapshot that is merged".into()
    }

    /// Returns a key with the value that was determined when the device was opened.
    fn resolved_key(&self) -> Option<(&'static str, String)> {
        None
    }

    /// Returns an image in object storage.
    fn stored(&self) -> Option<&Pulled> {
        None
    }

    /// Returns the device whose drop records an orderly close.
    fn closes(&self) -> Option<Weak<dyn Device>> {
        None
    }

    /// Creates a fork for a connection to this template, and adds it to the registry.
    fn fresh(&self, _template: &Entry, _registry: &Registry) -> Result<Arc<Entry>, Refusal> {
        unreachable!("the device is not a template")
    }

    /// Returns the names of the attributes, without those of the layers.
    fn attrs(&self) -> &'static [&'static str];

    /// Returns the value of an attribute. Sizes are numbers of bytes.
    fn value(&self, entry: &Entry, attr: &str) -> Option<Value>;

    /// Parses a new value of an attribute. Returns None if the device has no such attribute. By default
    /// only the memory limit of the forks' family and its behaviour there can be set.
    fn check(&self, entry: &Entry, attr: &str, text: &str) -> Option<Result<Change, Refusal>> {
        let (name, kind) = (entry.name(), self.name());
        if let Some(change) = Change::of_family(attr, text).filter(|_| entry.has_family()) {
            return Some(change.map_err(|why| Refusal::invalid(format!("{name}: {attr}={text}: {why}"))));
        }
        self.attrs().contains(&attr).then(|| {
            let why = format!("{name}: {attr}={text}: fixed for the life of {} device", a_kind(kind));
            Err(Refusal::failed(Errno::EBUSY, why))
        })
    }

    /// Applies changes that [`check`](Self::check) returned, each with its attribute and text.
    fn set(
        &self,
        entry: &Arc<Entry>,
        registry: &Registry,
        changes: &[(Change, &String, String)],
    ) -> Result<(), Refusal> {
        if changes.is_empty() {
            return Ok(());
        }
        let family = entry.family_of(registry)?;
        for (change, ..) in changes {
            change.apply_to_family(&family);
        }
        Ok(())
    }

    /// Returns the kind's own statistics and their name.
    fn stat(&self) -> Option<(&'static str, Value)> {
        None
    }
}

// ---- entries ------------------------------------------------------------------------------------

/// A device of the registry.
pub struct Entry {
    /// Specification with which the device was created. Settings can have changed since.
    pub spec: Spec,
    /// Words that would create the device with its present settings.
    pub words: Words,
    /// Identity, which distinguishes the device from others that had its name.
    pub identity: Identity,
    /// Kind-specific part of the device.
    pub kind: Box<dyn KindInstance>,
    /// Name of the template, for the fork of a connection. The fork ends with the connection.
    pub template: Option<String>,
    /// Layers over the data.
    pub layers: Layers,
    /// Device with its layers, as exports use it. A template has none.
    device: Option<Arc<dyn Device>>,
    /// Failed requests of clients.
    pub failures: Arc<Failures>,
    /// Counts the requests of `device`, in total and for each export.
    counting: Option<Arc<Counting>>,
    /// Present limits. Held only to read or replace the value.
    limits: Mutex<LimitSpec>,
    restart: Mutex<RestartPolicy>,
    /// Connections to the device, over all exports.
    pub clients: Arc<Places>,
    /// Requests of the device's forks, including removed ones.
    forks: Sum<Sum<Tally>>,
    /// Devices that this device depends on.
    needs: Vec<Arc<Entry>>,
    /// The device of `needs` that is the backing device of the family.
    pub(crate) backing: Option<Arc<Entry>>,
    /// Family of a base's forks, from the first fork on. Held also while the family is created.
    pub family: Mutex<Option<Family>>,
    /// Number of resets to the initial content: of a fork, to its base.
    pub rewinds: AtomicU64,
    /// Number of changes by clients at the last reset of the content.
    changes_wiped: AtomicU64,
    /// Origin of a snapshot in memory, and the origin's number of resets at that time.
    pub origin: Option<(Weak<Entry>, u64)>,
    /// The device as the origin of snapshots with stores. All writes go through it. None if the device
    /// cannot be an origin, for example a zoned one.
    pub cow_origin: Option<cow::Origin>,
}

impl Entry {
    /// Creates an entry without layers. `needs` are the devices that it depends on.
    pub fn new(
        spec: Spec,
        kind: Box<dyn KindInstance>,
        device: Option<Arc<dyn Device>>,
        needs: Vec<Arc<Entry>>,
    ) -> Self {
        if let Some(ram) = kind.ram() {
            ram.set_name(&spec.name);
        }
        let counting = device.map(|device| Arc::new(Counting::new(&spec.name, device)));
        let device = counting.clone().map(|counting| counting as Arc<dyn Device>);
        Self {
            words: Words::default(),
            identity: Identity::new(),
            restart: Mutex::new(RestartPolicy { keep: spec.keep, on_lost: spec.on_lost }),
            spec,
            kind,
            template: None,
            layers: Layers::default(),
            device,
            failures: Arc::default(),
            counting,
            limits: Mutex::default(),
            clients: Arc::default(),
            forks: Sum::default(),
            needs,
            backing: None,
            family: Mutex::default(),
            rewinds: AtomicU64::new(0),
            changes_wiped: AtomicU64::new(0),
            origin: None,
            cow_origin: None,
        }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Returns the device with its layers, as exports use it. A template has none.
    pub fn device(&self) -> Option<&Arc<dyn Device>> {
        self.device.as_ref()
    }

    /// Returns the RAM disk, fork or snapshot in memory, or the copies of a snapshot in memory.
    pub fn in_memory(&self) -> Option<&Ram> {
        self.kind.ram().map(|ram| &**ram).or_else(|| self.kind.copies())
    }

    /// Returns the size in bytes, for a template that of its forks.
    pub fn size(&self) -> u64 {
        match (&self.device, self.spec.kind.fork()) {
            (Some(device), _) => {
                let geometry = device.geometry();
                geometry.size - u64::from(geometry.padding)
            }
            (None, Some(ForkSpec { size: Some(size), .. })) => *size,
            (None, _) => self.needs.first().map_or(0, |base| base.size()),
        }
    }

    /// Returns true if the device is read-only.
    pub fn is_read_only(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.geometry().read_only)
    }

    /// Returns the devices that this device depends on. They cannot be removed before it.
    pub fn needs(&self) -> &[Arc<Entry>] {
        &self.needs
    }
}
