//! Kinds of devices, such as `ram`, `fork`, `file` and `nbd`.
//!
//! Each kind has a module for the keys, setup and attributes of its devices, behind the traits
//! [`KindConfig`] and [`KindInstance`]. This module contains the common part: [`Spec`] specifies a
//! device, and [`Entry`] is an existing device. [`registry`] stores the entries by name.

mod build;
mod check_size;
mod counters;
mod entry;
mod exclusive;
mod identity;
mod kept;
mod limits;
mod memory;
mod names;
mod null;
mod outer;
mod parallel_open;
pub mod registry;
mod snapshot;
#[cfg(test)]
mod tests;
mod wipe;
mod words;

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use freestone::cow;
use freestone::device::{self, Device, DropObserver};
use freestone::file::FileChange;
use freestone::qcow2::Format;
use freestone::ram::{Family, Ram};
use freestone_nbd_client::Uri;
use serde_json::Value;

pub use self::build::build;
use self::build::{DataDevice, finish_entry, warn_of_record};
pub use self::entry::Entry;
pub use self::exclusive::ExclusiveUse;
use self::identity::parse_data_loss_policy;
pub use self::identity::{DataLossPolicy, Identity, RESTART_KEYS, RestartPolicy};
pub use self::limits::WaitBypass;
pub use self::memory::fork::{ForkSpec, over_stat};
pub use self::memory::ram::{
    Change, RamSpec, auto_recompressed, backing, bd_stat, debug_stat, dedup, full_stat, groups, io_stat,
    mm_stat,
};
pub use self::memory::restored::{
    RestoreDependencies, RestoreOptions, RestoredSpec, build_kept, build_restored,
};
pub use self::memory::template::TemplateSpec;
use self::memory::{fork, ram, template};
pub use self::names::RESTORED;
use self::names::{IS_READ_ONLY, IS_SNAPSHOT, is_live, parse_name};
pub use self::null::{NullBacking, NullData, NullSpec};
pub use self::outer::file::FileSpec;
pub use self::outer::image::{ImageSpec, OpenImage, of_store};
pub use self::outer::nbd::NbdSpec;
pub use self::outer::qcow2::Qcow2Spec;
#[cfg(feature = "rbd")]
use self::outer::rbd;
#[cfg(feature = "rbd")]
pub use self::outer::rbd::RbdSpec;
use self::outer::{file, image, nbd, qcow2};
use self::parallel_open::Opener;
pub use self::parallel_open::{ParallelOpen, ParallelOpenGuard};
use self::registry::Registry;
pub use self::snapshot::{
    CowDevice, CowPlace, CowSpec, CutOutcome, SnapshotSpec, SnapshotStack, cow_stat, merge, missed_writes,
    snapshots,
};
use crate::entries::{Entries, SpecError, nearest, with_article};
use crate::family::FamilySpec;
use crate::keys::{Keys, parse_bool};
use crate::layers::{DataInfo, LayerSpec};
use crate::limits::LimitSpec;
use crate::notes::MemoryNotes;
use crate::refusal::Refusal;
use crate::tls::TlsClients;

/// Function that parses the keys of a kind.
type Take = fn(&Keys) -> Result<KindSpec, SpecError>;

const COUNT: usize = 9 + cfg!(feature = "rbd") as usize;
/// Name and parser of every kind that can be specified.
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
/// Names of all kinds that can be specified.
pub const KINDS: [&str; ALL.len()] = {
    let (mut names, mut at) = ([""; ALL.len()], 0);
    while at < names.len() {
        names[at] = ALL[at].0;
        at += 1;
    }
    names
};

// ---- specifications -----------------------------------------------------------------------------

/// Checked specification of a device. Nothing is opened yet.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// Name of the device.
    pub name: String,
    /// Keys and values of the specification, as they were typed.
    pub words: Entries,
    /// True to publish the device on the addresses of `serve`, or `None` for the default.
    pub publish: Option<bool>,
    /// NBD clients that may use the device, or `None` for all.
    pub tls_clients: Option<TlsClients>,
    /// Handling of the exports if a restart loses the content, or `None` for the default.
    pub on_data_loss: Option<DataLossPolicy>,
    /// True if the content is saved in the state directory of the server.
    pub keep: bool,
    /// Kind of the device, with the values of its keys.
    pub kind: KindSpec,
    /// Specification of the layers over the data, such as zones and faults.
    pub layers: LayerSpec,
    /// I/O and connection limits of the device.
    pub limits: LimitSpec,
}

/// Specification of a device, by its kind.
#[derive(Debug, Clone, PartialEq)]
pub enum KindSpec {
    /// A compressed RAM disk.
    Ram(Box<RamSpec>),
    /// A writable disk over a base device.
    Fork(ForkSpec),
    /// A snapshot of a device.
    Snapshot(Box<SnapshotSpec>),
    /// A template, of which each connection uses a separate fork.
    Template(TemplateSpec),
    /// A test drive, like `null_blk`.
    Null(Box<NullSpec>),
    /// A raw image or a block device.
    File(Box<FileSpec>),
    /// A qcow2 image, read-only.
    Qcow2(Box<Qcow2Spec>),
    /// An image in object storage, read-only.
    Image(Box<ImageSpec>),
    /// An export of another NBD server.
    Nbd(Box<NbdSpec>),
    /// An image in Ceph's RBD.
    #[cfg(feature = "rbd")]
    Rbd(Box<RbdSpec>),
    /// A device restored from a saved file.
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

/// Kind-specific part of a specification. The default methods fit most kinds.
pub trait KindConfig {
    /// Opens the device without its layers. Devices on which it depends must be in the registry.
    /// The error does not name the device.
    fn build(&self, spec: &Spec, registry: &Registry) -> Result<DataDevice, Refusal>;

    /// Returns a function that opens a remote device in advance, or `None` for other devices.
    fn opener(&self, _: &Spec) -> Option<Opener> {
        None
    }

    /// Returns the specification of the family that the device or its forks share, if any.
    fn family(&self) -> Option<&FamilySpec> {
        None
    }

    /// Returns the specified size in bytes, if there is one.
    fn size(&self) -> Option<u64> {
        None
    }

    /// Returns true if the device is specified as read-only.
    fn is_read_only(&self) -> bool {
        false
    }

    /// Returns the specification of a fork, or of the forks of a template, else `None`.
    fn fork(&self) -> Option<&ForkSpec> {
        None
    }

    /// Returns the name of the base of a fork or template, or of the origin of a snapshot.
    fn parent_name(&self) -> Option<&str> {
        None
    }

    /// Returns the name of a snapshot's COW device, if that is a device of the server.
    fn cow_device_name(&self) -> Option<&str> {
        None
    }

    /// Returns the other devices that this device must use exclusively.
    fn exclusive_uses(&self) -> Vec<ExclusiveUse<'_>> {
        self.family().and_then(ExclusiveUse::of_backing_device).into_iter().collect()
    }

    /// Returns the devices that must not be rewound, merged or published during creation.
    fn claimed_devices(&self) -> Vec<&str> {
        self.exclusive_uses().iter().map(|takes| takes.name).collect()
    }

    /// Returns the path and format of an image file, with which a delta refers to its base.
    fn image(&self) -> Option<(&Path, Format)> {
        None
    }

    /// Returns the URI of an export of another NBD server, else `None`.
    fn uri(&self) -> Option<&Uri> {
        None
    }

    /// Returns true if devices of this kind lose their data when the server ends.
    fn is_volatile(&self) -> bool {
        false
    }

    /// Returns the properties of the data that the layers over it need.
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
    /// Checks the kind, keys and values of a parsed specification.
    pub fn from_entries(entries: Entries) -> Result<Self, SpecError> {
        freestone::trail::step!();
        let (words, mut entries) = (entries.clone(), entries);
        let limits = LimitSpec::take(&mut entries)?;
        let keys = Keys(entries);
        let Some((_, take)) = ALL.iter().find(|(name, _)| *name == keys.0.kind) else {
            let Entries { name, kind, .. } = keys.0;
            let hint = nearest(&kind, &KINDS);
            return Err(SpecError::Kind { name, kind, hint, kinds: &KINDS });
        };
        null::check_supported(&keys)?;
        keys.check_names()?;
        let kind = take(&keys)?;
        let publish = keys.take("publish", parse_bool)?;
        let tls_clients = keys.take("tls_clients", TlsClients::parse)?;
        let on_data_loss = keys.take("on_data_loss", parse_data_loss_policy)?;
        let layers = LayerSpec::take(&keys)?;
        let is_file = kind.data_info().file.is_some();
        layers.check(&keys, kind.size(), kind.is_read_only(), is_file)?;
        let keep = keys.take("keep", parse_bool)?.unwrap_or(false);
        let name = keys.0.name.clone();
        let spec = Self { name, words, publish, tls_clients, on_data_loss, keep, kind, layers, limits };
        if on_data_loss.is_some() && !spec.is_volatile() && spec.kind.parent_name().is_none() {
            return Err(keys.refuse("on_data_loss", "its content does not end with the server"));
        }
        if let (true, Some(why)) = (keep, spec.why_not_kept()) {
            return Err(keys.refuse("keep", why));
        }
        Ok(spec)
    }

    /// Returns the reason why the content cannot be saved in the state directory, or `None`.
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

    /// Returns true if both specify the same device, apart from the name and `publish`.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.kind, &self.layers, &self.tls_clients, self.on_data_loss, self.keep, self.limits)
            == (&other.kind, &other.layers, &other.tls_clients, other.on_data_loss, other.keep, other.limits)
    }

    /// Returns true if the content or the zone state of the device is in memory only, so that it is
    /// lost when the server ends.
    pub fn is_volatile(&self) -> bool {
        self.kind.is_volatile() || (self.layers.zones.is_some() && self.kind.data_info().file.is_none())
    }
}

// ---- devices of a kind --------------------------------------------------------------------------

/// Kind-specific part of an open device. The default methods fit most kinds.
pub trait KindInstance: Send + Sync {
    /// Returns the name of the kind.
    fn name(&self) -> &'static str;

    /// Returns the device if it is a RAM disk, fork or snapshot in memory.
    fn ram(&self) -> Option<&Arc<Ram>> {
        None
    }

    /// Returns the device if it is a fork.
    fn fork(&self) -> Option<&Arc<Ram>> {
        None
    }

    /// Returns the device if it is a snapshot in memory.
    fn memory_snapshot(&self) -> Option<&Arc<Ram>> {
        None
    }

    /// Returns the device if it is a snapshot with a COW device.
    fn cow(&self) -> Option<&cow::Snapshot> {
        None
    }

    /// Returns the RAM disk that stores the copies of a snapshot without a COW device.
    fn cow_ram(&self) -> Option<&Ram> {
        None
    }

    /// Returns the device that stores the copies of a snapshot.
    fn cow_device(&self) -> Option<&CowDevice> {
        None
    }

    /// Returns the family that this device started, else `None`.
    fn own_family(&self) -> Option<Family> {
        None
    }

    /// Returns the data of the device if it is outside of the server, such as a file.
    fn outside(&self) -> Option<&dyn Device> {
        None
    }

    /// Checks that the device can be an origin or COW device. The error continues a sentence.
    fn check_origin(&self) -> Result<(), &'static str> {
        match self.outside() {
            Some(data) if data.geometry().read_only => Err(IS_READ_ONLY),
            _ => Ok(()),
        }
    }

    /// Returns the storage for an origin's notes about its snapshots.
    fn notes(&self) -> Box<dyn cow::Notes> {
        Box::<MemoryNotes>::default()
    }

    /// Checks that the device can be the base of a fork. The error continues a sentence.
    fn check_base(&self, base: &Entry) -> Result<(), String> {
        if self.outside().is_some() && base.is_read_only() { Ok(()) } else { Err(is_live(base)) }
    }

    /// Returns true if the device can be a base that does not share the memory of its forks.
    fn is_outer_base(&self, read_only: bool) -> bool {
        read_only && self.outside().is_some()
    }

    /// Returns the file of a base and the kind of change, if the last check found that the file has
    /// changed since it was opened.
    fn changed(&self) -> Option<(PathBuf, FileChange)> {
        None
    }

    /// Returns the paths of a base's files, each with a text that changes when the file changes.
    fn file_identities(&self) -> Vec<(PathBuf, String)> {
        Vec::new()
    }

    /// Returns true if [`wipe`](Self::wipe) is supported.
    fn can_wipe(&self) -> bool {
        false
    }

    /// Resets the data to its initial content, and with `counters` also the counters of RAM disks.
    fn wipe(&self, _counters: bool) -> device::Result<()> {
        Err(device::Error::Unsupported)
    }

    /// Returns true if [`wipe`](Self::wipe) would not change the content. Resets `counters` then.
    fn skip_wipe(&self, _counters: bool) -> bool {
        false
    }

    /// Starts or continues the merge requested by `merge=yes`. The origin then reads as merged.
    fn begin_merge(&self, _entry: &Arc<Entry>, _registry: &Registry) -> Result<(), Refusal> {
        Ok(())
    }

    /// Returns the error message for an origin with an unfinished merge.
    fn half_merged_message(&self, _name: &str) -> String {
        "an unfinished merge left it half old, half new; open the snapshot that is merged".into()
    }

    /// Returns a key whose value was determined when the device was opened, and that value.
    fn resolved_key(&self) -> Option<(&'static str, String)> {
        None
    }

    /// Returns the device if it is an image in object storage.
    fn stored_image(&self) -> Option<&OpenImage> {
        None
    }

    /// Returns an observer of the end of the device, if the device records a clean close when it is dropped.
    fn drop_observer(&self) -> Option<DropObserver> {
        None
    }

    /// Creates a fork for a connection to this template, and adds the fork to the registry.
    fn create_connection_fork(&self, _template: &Entry, _registry: &Registry) -> Result<Arc<Entry>, Refusal> {
        unreachable!("the device is not a template")
    }

    /// Returns the names of the attributes, except those of layers and of the family of a base's forks.
    fn attrs(&self) -> &'static [&'static str];

    /// Returns the value of an attribute, or `None` if it does not exist. Sizes are in bytes.
    fn value(&self, entry: &Entry, attr: &str) -> Option<Value>;

    /// Parses a new value of an attribute. Returns `None` if the device has no such attribute. By
    /// default only `mem_limit` and the `full` keys of the forks' family can be set.
    fn check(&self, entry: &Entry, attr: &str, text: &str) -> Option<Result<Change, Refusal>> {
        let (name, kind) = (entry.name(), self.name());
        if let Some(change) = Change::of_family(attr, text).filter(|_| entry.has_family()) {
            return Some(change.map_err(|why| refusal!(invalid, "{name}: {attr}={text}: {why}")));
        }
        entry.kind_attrs().contains(&attr).then(|| {
            Err(refusal!(EBUSY, "{name}: {attr}={text}: fixed for the life of {} device", with_article(kind)))
        })
    }

    /// Applies changes that [`check`](Self::check) returned, each with the attribute and its text.
    fn set(
        &self,
        entry: &Arc<Entry>,
        registry: &Registry,
        changes: &[(Change, &String, String)],
    ) -> Result<(), Refusal> {
        if changes.is_empty() {
            return Ok(());
        }
        let family = entry.ensure_family(registry)?;
        for (change, ..) in changes {
            change.apply_to_family(&family);
        }
        Ok(())
    }

    /// Returns kind-specific statistics and their name, if there are any.
    fn stat(&self) -> Option<(&'static str, Value)> {
        None
    }
}
