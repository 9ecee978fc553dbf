//! The kinds of devices. Each has a file of its own: its keys and how they are parsed, how it is
//! set up, its attributes, and what else is not the same for all of them. Here is what they have in
//! common: [`Spec`] is a device as it was asked for, [`Entry`] one that is there.

mod ahead;
mod build;
mod counted;
mod file;
mod fork;
mod found;
mod identity;
mod image;
mod limited;
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
mod taken;
mod template;
#[cfg(test)]
mod tests;
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
use self::build::{Built, finished};
pub use self::file::FileSpec;
pub use self::fork::{ForkSpec, over_stat};
use self::identity::parse_on_lost;
pub use self::identity::{Identity, OnLost};
pub use self::image::{ImageSpec, Pulled, of_store};
pub use self::limited::NoWaiting;
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
pub use self::restored::{RESTORED, RestoredSpec, Said, StandsOn, kept, restored};
pub use self::snapshot::{
    CowDevice, CowPlace, CowSpec, CutOutcome, SnapshotSpec, Stack, cow_stat, merge, missed_writes, snapshots,
};
pub use self::taken::Takes;
pub use self::template::TemplateSpec;
use self::words::Words;
use crate::entries::{Entries, SpecError, a_kind, nearest};
use crate::family::FamilySpec;
use crate::keys::{Keys, parse_bool};
use crate::layers::{Below, LayerSpec, Layers};
use crate::limits::LimitSpec;
use crate::notes::MemoryNotes;
use crate::refusal::{Errno, Refusal};
use crate::tls::TlsClients;

/// How a kind takes its keys.
type Take = fn(&Keys) -> Result<KindSpec, SpecError>;

/// How many there are.
const COUNT: usize = 9 + cfg!(feature = "rbd") as usize;
/// Every kind that can be asked for.
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
/// Their names.
const KINDS: [&str; ALL.len()] = {
    let (mut names, mut at) = ([""; ALL.len()], 0);
    while at < names.len() {
        names[at] = ALL[at].0;
        at += 1;
    }
    names
};

// ---- asked for ----------------------------------------------------------------------------------

/// A device as it was asked for; every value is checked, nothing is opened yet.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// Its name.
    pub name: String,
    /// The words that it was asked for with.
    pub words: Entries,
    /// Publish it on the addresses of `serve`, where this was said.
    pub publish: Option<bool>,
    /// Which clients see it over NBD, where not all do.
    pub tls_clients: Option<TlsClients>,
    /// What becomes of its exports where a server that ended has lost its content, where this was said.
    pub on_lost: Option<OnLost>,
    /// Its content is saved where the server keeps its state.
    pub keep: bool,
    /// What it is.
    pub kind: KindSpec,
    /// What lies over its data.
    pub layers: LayerSpec,
    /// What it lets through.
    pub limits: LimitSpec,
}

/// The kinds with their keys.
#[derive(Debug, Clone, PartialEq)]
pub enum KindSpec {
    /// A compressed RAM disk.
    Ram(Box<RamSpec>),
    /// A disk over a base.
    Fork(ForkSpec),
    /// What a device held at one moment.
    Snapshot(Box<SnapshotSpec>),
    /// A fork for every connection.
    Template(TemplateSpec),
    /// A test drive.
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
    /// From a saved file.
    Restored(RestoredSpec),
}

impl Deref for KindSpec {
    type Target = dyn Asked;

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

/// A kind as it was asked for. What it does not say is the usual.
pub trait Asked {
    /// Sets it up, without its layers. What it stands on is looked for in the registry. The error
    /// does not name the device.
    fn build(&self, spec: &Spec, registry: &Registry) -> Result<Built, Refusal>;

    /// What opens it before its turn, where it is far.
    fn opener(&self, _: &Spec) -> Option<Opener> {
        None
    }

    /// What it shares with others: with its own snapshots and their forks, or its forks with one
    /// another.
    fn family(&self) -> Option<&FamilySpec> {
        None
    }

    /// Its size in bytes, where that was said.
    fn size(&self) -> Option<u64> {
        None
    }

    /// Only reads are served.
    fn is_read_only(&self) -> bool {
        false
    }

    /// What forks are made of, for a fork or template.
    fn fork(&self) -> Option<&ForkSpec> {
        None
    }

    /// The name of what it shows where it holds nothing itself.
    fn below(&self) -> Option<&str> {
        None
    }

    /// The name of the device that takes its copies.
    fn copies_to(&self) -> Option<&str> {
        None
    }

    /// Devices that it is to have to itself.
    fn takes(&self) -> Vec<Takes<'_>> {
        self.family().and_then(Takes::pages).into_iter().collect()
    }

    /// Devices that must not be rewound, merged or published while it is set up.
    fn changes(&self) -> Vec<&str> {
        self.takes().iter().map(|takes| takes.name).collect()
    }

    /// The image that it is, as the base of a delta names it.
    fn image(&self) -> Option<(&Path, Format)> {
        None
    }

    /// The export of an NBD server that it is.
    fn uri(&self) -> Option<&Uri> {
        None
    }

    /// See [`Spec::is_lost`].
    fn is_lost(&self) -> bool {
        false
    }

    /// What its layers have to know.
    fn below_layers(&self) -> Below<'_> {
        Below::default()
    }
}

impl FromStr for Spec {
    type Err = SpecError;
    fn from_str(text: &str) -> Result<Self, SpecError> {
        Self::from_entries(Entries::parse(text)?)
    }
}

impl Spec {
    /// Checks kinds, keys and values.
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
        let is_file = kind.below_layers().file.is_some();
        layers.check(&keys, kind.size(), kind.is_read_only(), is_file)?;
        let keep = keys.take("keep", parse_bool)?.unwrap_or(false);
        let name = keys.0.name.clone();
        let spec = Self { name, words, publish, tls_clients, on_lost, keep, kind, layers, limits };
        if on_lost.is_some() && !spec.is_lost() && spec.kind.below().is_none() {
            return Err(keys.refuse("on_lost", "it holds nothing that is lost with the server"));
        }
        if let (true, Some(why)) = (keep, spec.why_not_kept()) {
            return Err(keys.refuse("keep", why));
        }
        Ok(spec)
    }

    /// What it holds is more than its pages, or is kept elsewhere.
    fn why_not_kept(&self) -> Option<&'static str> {
        let cow = matches!(&self.kind, KindSpec::Snapshot(snapshot) if snapshot.cow.is_some());
        if cow {
            return Some("what it holds is where cow says");
        }
        if self.layers.zones.is_some() {
            return Some("not with zoned=1: the conditions of zones would be lost");
        }
        let apart = self.layers.power_cut || self.layers.record.is_some();
        apart.then_some("not with power_cut=yes or record: what is not flushed would be lost")
    }

    /// Whether the same was asked for.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.kind, &self.layers, &self.tls_clients, self.on_lost, self.keep, self.limits)
            == (&other.kind, &other.layers, &other.tls_clients, other.on_lost, other.keep, other.limits)
    }

    /// What it holds itself is in memory, and ends with the server.
    pub fn is_lost(&self) -> bool {
        self.kind.is_lost() || (self.layers.zones.is_some() && self.kind.below_layers().file.is_none())
    }
}

// ---- set up -------------------------------------------------------------------------------------

/// What is not the same for all devices that are there. What a kind does not say is the usual.
pub trait Made: Send + Sync {
    /// The name of the kind.
    fn name(&self) -> &'static str;

    /// Disk, fork or snapshot in memory.
    fn ram(&self) -> Option<&Arc<Ram>> {
        None
    }

    /// A fork.
    fn fork(&self) -> Option<&Arc<Ram>> {
        None
    }

    /// A snapshot in memory.
    fn memory_snapshot(&self) -> Option<&Arc<Ram>> {
        None
    }

    /// A snapshot whose copies lie in a store.
    fn cow(&self) -> Option<&cow::Snapshot> {
        None
    }

    /// In memory, what a file's snapshot has copied.
    fn copies(&self) -> Option<&Ram> {
        None
    }

    /// Where its copies lie.
    fn cow_device(&self) -> Option<&CowDevice> {
        None
    }

    /// The family that began with it.
    fn own_family(&self) -> Option<Family> {
        None
    }

    /// Refuses to be an origin, and to take the copies of one, with half a sentence.
    fn check_origin(&self) -> Result<(), &'static str>;

    /// What an origin notes beside its data.
    fn notes(&self) -> Box<dyn cow::Notes> {
        Box::<MemoryNotes>::default()
    }

    /// Refuses to be a base, with half a sentence.
    fn check_base(&self, base: &Entry) -> Result<(), String>;

    /// Whether forks can be made of it, each with a family that is not its own.
    fn is_outer_base(&self, _read_only: bool) -> bool {
        false
    }

    /// Returns the file of a base that has changed since it was opened, as of the last look, and how.
    fn changed(&self) -> Option<(PathBuf, Changed)> {
        None
    }

    /// Returns the files of a base, each with a text that is another one after a change.
    fn file_identities(&self) -> Vec<(PathBuf, String)> {
        Vec::new()
    }

    /// Whether its data can be set back to what it was in the beginning.
    fn can_wipe(&self) -> bool {
        false
    }

    /// Sets the data back to the beginning; on request the counters of a RAM disk or fork as well.
    fn wipe(&self, _counters: bool) -> device::Result<()> {
        Err(device::Error::Unsupported)
    }

    /// Begins the merge that `merge=yes` asks for, or goes on with one. Then the origin shows it.
    fn begin_merge(&self, _entry: &Arc<Entry>, _registry: &Registry) -> Result<(), Refusal> {
        Ok(())
    }

    /// What to do about an origin of which only a part is merged.
    fn half_merged(&self, _name: &str) -> String {
        "a merge into it is under way, and it is half old, half new; open the snapshot that is merged".into()
    }

    /// A key that says more than was asked for, now that it is set up.
    fn settled(&self) -> Option<(&'static str, String)> {
        None
    }

    /// The image in object storage that it is.
    fn stored(&self) -> Option<&Pulled> {
        None
    }

    /// What says beside its data how it was closed.
    fn closes(&self) -> Option<Weak<dyn Device>> {
        None
    }

    /// Another fork, for a connection to this template; it is among the devices.
    fn fresh(&self, _template: &Entry, _registry: &Registry) -> Result<Arc<Entry>, Refusal> {
        unreachable!("only templates are published as such")
    }

    /// The names of its attributes, without those of its layers.
    fn attrs(&self) -> &'static [&'static str];

    /// The value of one of them. Sizes are numbers of bytes.
    fn value(&self, entry: &Entry, attr: &str) -> Option<Value>;

    /// Checks what an attribute is to be set to; `None` where there is none of that name. What the
    /// forks of a base share has a limit, and what is done there; all else is fixed.
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

    /// Sets what [`check`](Self::check) has allowed, each with its name and text.
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
            change.make_of_family(&family);
        }
        Ok(())
    }

    /// The name of its own statistics, and these.
    fn stat(&self) -> Option<(&'static str, Value)> {
        None
    }
}

// ---- there --------------------------------------------------------------------------------------

/// A device with its name.
pub struct Entry {
    /// As it was asked for; what can change later is asked of the device.
    pub spec: Spec,
    /// The words that would make it as it is set up now.
    pub words: Words,
    /// By which it is told from others that have had its name.
    pub identity: Identity,
    /// The device.
    pub kind: Box<dyn Made>,
    /// The template, where this was made for one of its connections. It goes with that.
    pub template: Option<String>,
    /// What lies over its data.
    pub layers: Layers,
    /// As exports see it, with its layers; a template has none.
    device: Option<Arc<dyn Device>>,
    /// Requests of its clients that failed.
    pub failures: Arc<Failures>,
    /// Counts what is asked of that, on all ways.
    counting: Option<Arc<Counting>>,
    /// What it lets through now. Locked for a look or a change.
    limits: Mutex<LimitSpec>,
    /// Who is connected to it, on whatever way.
    pub clients: Arc<Places>,
    /// What was asked of its forks, of those that have gone as well.
    forks: Sum<Sum<Tally>>,
    /// What has to be there as long as this is.
    needs: Vec<Arc<Entry>>,
    /// The one of them that takes its family's pages.
    pub(crate) backing: Option<Arc<Entry>>,
    /// What the forks of a base share, from the first one on. Locked also while it is made.
    pub family: Mutex<Option<Family>>,
    /// How often a fork was set back to its base.
    pub rewinds: AtomicU64,
    /// Of a snapshot in memory: its origin, and how often that had been rewound.
    pub origin: Option<(Weak<Entry>, u64)>,
    /// The device, as the origin of snapshots with stores. Has all that is written, but for zoned
    /// devices.
    pub cow_origin: Option<cow::Origin>,
}

impl Entry {
    /// A device that stands on others, or on nothing.
    pub fn new(
        spec: Spec,
        kind: Box<dyn Made>,
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
            origin: None,
            cow_origin: None,
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The device as exports see it. A template has none.
    pub fn device(&self) -> Option<&Arc<dyn Device>> {
        self.device.as_ref()
    }

    /// What it keeps in memory: a RAM disk or fork itself, the copies of a file's snapshot.
    pub fn in_memory(&self) -> Option<&Ram> {
        self.kind.ram().map(|ram| &**ram).or_else(|| self.kind.copies())
    }

    /// Its size in bytes; of a template that of its forks.
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

    /// Whether it takes no writes, from anybody.
    pub fn is_read_only(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.geometry().read_only)
    }

    /// Sets the data back, as the kind does it: see [`Made::wipe`].
    pub fn wipe(&self, counters: bool) -> device::Result<()> {
        if let Some(origin) = &self.cow_origin {
            origin.was_changed();
        }
        self.layers.wipe(&|| self.kind.wipe(counters))
    }

    /// What has to be there as long as this is.
    pub fn needs(&self) -> &[Arc<Entry>] {
        &self.needs
    }
}
