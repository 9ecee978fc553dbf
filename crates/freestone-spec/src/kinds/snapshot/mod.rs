//! Kind `snapshot`: the content of one device, or of several devices at one moment. Snapshots of RAM
//! disks and forks share the memory of their family. Snapshots with stores, of any device, are in
//! [`cow`]. [`snapshots`] takes several at one moment with a [`consistency_group`].

mod cow;
mod stack;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use freestone::consistency_group::{self, Late, NotInTime, Pending};
use freestone::cow::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, Origin, StoreKind};
use freestone::device::Blocking as _;
use freestone::ram::{PendingSnapshot, Ram};
use serde_json::Value;

use self::cow::PendingCow;
pub use self::cow::{CowDevice, cow_stat, merge, missed_writes};
pub use self::stack::{CutOutcome, Stack};
use super::fork;
use super::registry::Registry;
use super::{
    Built, Entry, ExclusiveUse, IS_SNAPSHOT, KindConfig, KindInstance, Spec, finish_entry, parse_name,
};
use crate::entries::SpecError;
use crate::family::{self, FamilySpec};
use crate::keys::{Keys, joined, parse_bool, parse_length};
use crate::path_text;
use crate::refusal::{Errno, Refusal};
use crate::size::{self, exact};

pub(super) const NAME: &str = "snapshot";
const OWN_KEYS: [&str; 10] = [
    "origin",
    "cow",
    "cow_size",
    "store",
    "chunk_size",
    "readonly",
    "discard_zeroes_cow",
    "discard_passdown_origin",
    "force",
    "merge",
];
const KEYS: [&str; 28] = joined(&OWN_KEYS, &family::KEYS, &["publish", "tls_clients", "on_lost", "keep"]);
/// Keys that need `cow`.
const COW_KEYS: [&str; 4] = ["cow_size", "store", "force", "merge"];

/// Specification of a snapshot.
#[derive(Debug, Clone, PartialEq)]
pub struct SnapshotSpec {
    /// Name of the origin.
    pub origin: String,
    /// COW device. None: a snapshot of a RAM disk or fork needs no copies, because its origin hands pages
    /// over; any other snapshot has a private RAM disk.
    pub cow: Option<CowSpec>,
    /// Unit of copies in bytes; None for the default.
    pub chunk_size: Option<u64>,
    /// Read-only for users. None: read-only without `cow`, writable with it.
    pub readonly: Option<bool>,
    /// A discard of the snapshot zeroes the snapshot's own chunks.
    pub discard_zeroes_cow: bool,
    /// A discard of the snapshot is also passed to the origin.
    pub discard_passdown_origin: bool,
    /// Family of the snapshot's forks, and of copies in memory.
    pub family: FamilySpec,
    /// A key of the family was given.
    pub family_said: bool,
}

/// Specification of a COW device and its store.
#[derive(Debug, Clone)]
pub struct CowSpec {
    /// File, or device of the server.
    pub place: CowPlace,
    /// Size of the file in bytes; None for its present size.
    pub size: Option<u64>,
    /// Kind of the store.
    pub store: StoreKind,
    /// Allow a persistent store if the origin or the device ends with the process.
    pub force: bool,
    /// Begin to merge the snapshot into its origin at once.
    pub merge: bool,
}

/// Compares all but `force`, which only applies to the creation of the snapshot.
impl PartialEq for CowSpec {
    fn eq(&self, other: &Self) -> bool {
        let Self { place, size, store, force: _, merge } = self;
        (place, size, store, merge) == (&other.place, &other.size, &other.store, &other.merge)
    }
}

impl Eq for CowSpec {}

/// A COW device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CowPlace {
    /// A file or disk.
    Path(PathBuf),
    /// A device of the server.
    Device(String),
}

impl CowPlace {
    /// Returns the name of a device of the server.
    fn device(&self) -> Option<&str> {
        match self {
            Self::Device(name) => Some(name),
            Self::Path(_) => None,
        }
    }
}

impl SnapshotSpec {
    pub(super) fn take(keys: &Keys) -> Result<Self, SpecError> {
        keys.allow(&KEYS)?;
        let origin = keys.need(NAME, "origin", "origin=ram0", parse_name)?;
        let cow = match keys.take("cow", parse_cow)? {
            Some(place) => Some(CowSpec {
                size: keys.take("cow_size", parse_length)?,
                store: keys.take("store", parse_store)?.unwrap_or_default(),
                force: keys.take("force", parse_bool)?.unwrap_or(false),
                merge: keys.take("merge", parse_bool)?.unwrap_or(false),
                place,
            }),
            None => match COW_KEYS.iter().find(|key| keys.typed(key).is_some()) {
                Some(key) => return Err(keys.refuse(key, "only with cow=PATH or cow=DEVICE")),
                None => None,
            },
        };
        if let Some(CowSpec { place: CowPlace::Device(_), size: Some(_), .. }) = &cow {
            return Err(keys.refuse("cow_size", "only where cow is a file; a path has a slash, ./x.cow"));
        }
        if cow.as_ref().is_some_and(|cow| cow.merge && !cow.store.is_persistent()) {
            return Err(keys.refuse("merge", "a transient snapshot (store=N) cannot be merged"));
        }
        let discard_zeroes_cow = keys.take("discard_zeroes_cow", parse_bool)?.unwrap_or(false);
        let discard_passdown_origin = keys.take("discard_passdown_origin", parse_bool)?.unwrap_or(false);
        if discard_passdown_origin && !discard_zeroes_cow {
            return Err(keys.refuse("discard_passdown_origin", "only with discard_zeroes_cow=yes"));
        }
        Ok(Self {
            origin,
            cow,
            chunk_size: keys.take("chunk_size", parse_chunk)?,
            readonly: keys.take("readonly", parse_bool)?,
            discard_zeroes_cow,
            discard_passdown_origin,
            family: FamilySpec::take(keys)?,
            family_said: family::KEYS.iter().any(|key| keys.typed(key).is_some()),
        })
    }
}

/// Parses `cow`: a path has a slash, the name of a device has none.
fn parse_cow(text: &str) -> Result<CowPlace, String> {
    if text.contains('/') {
        return Ok(CowPlace::Path(path_text::path(text)));
    }
    let device = parse_name(text);
    device.map(CowPlace::Device).map_err(|_| "must be a path with a slash, ./x.cow, or a device".into())
}

fn parse_store(text: &str) -> Result<StoreKind, String> {
    let must = "must be P (persistent), PO (persistent, with overflow) or N (transient)";
    text.parse().map_err(|_| must.into())
}

fn parse_chunk(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text).map_err(|e| e.to_string())?;
    if bytes.is_power_of_two() && (CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&bytes) {
        return Ok(bytes);
    }
    let (min, max) = (size::exact(CHUNK_BYTES_MIN), size::exact(CHUNK_BYTES_MAX));
    Err(format!("must be a power of two from {min} to {max}"))
}

// ---- setting up ---------------------------------------------------------------------------------

impl KindConfig for SnapshotSpec {
    fn build(&self, spec: &Spec, registry: &Registry) -> Result<Built, Refusal> {
        let mut prepared = [self.prepare(&spec.name, registry)?];
        take_all(&mut prepared).map_err(|(_, refusal)| refusal)?;
        let [prepared] = prepared;
        Ok(prepared.finish())
    }

    fn family(&self) -> Option<&FamilySpec> {
        Some(&self.family)
    }

    fn below(&self) -> Option<&str> {
        Some(&self.origin)
    }

    fn copies_to(&self) -> Option<&str> {
        self.cow.as_ref()?.place.device()
    }

    fn is_lost(&self) -> bool {
        !self.cow.as_ref().is_some_and(|cow| cow.store.is_persistent())
    }

    fn takes(&self) -> Vec<ExclusiveUse<'_>> {
        self.copies_to()
            .map(ExclusiveUse::copies)
            .into_iter()
            .chain(ExclusiveUse::pages(&self.family))
            .collect()
    }

    fn changes(&self) -> Vec<&str> {
        let takes = self.takes();
        std::iter::once(self.origin.as_str()).chain(takes.iter().map(|takes| takes.name)).collect()
    }
}

/// Takes snapshots of several devices at one moment.
pub fn snapshots(specs: Vec<Spec>, registry: &Registry) -> Result<Vec<Entry>, Refusal> {
    let mut prepared = Vec::with_capacity(specs.len());
    let mut taken = HashSet::new();
    for spec in &specs {
        if let Some(twice) = spec.kind.takes().iter().find(|takes| !taken.insert(takes.name.to_owned())) {
            return Err(twice
                .refuse(Errno::EBUSY, "is given for another of these snapshots too")
                .of(&spec.name));
        }
        let super::KindSpec::Snapshot(snapshot) = &spec.kind else {
            unreachable!("the caller passes snapshots")
        };
        prepared.push(snapshot.prepare(&spec.name, registry).map_err(|refusal| refusal.of(&spec.name))?);
    }
    take_all(&mut prepared).map_err(|(at, refusal)| refusal.of(&specs[at].name))?;
    specs.into_iter().zip(prepared).map(|(spec, prepared)| finish_entry(spec, prepared.finish())).collect()
}

/// Takes all prepared snapshots at one moment. An error has the index of the snapshot that failed.
fn take_all(prepared: &mut [PreparedSnapshot]) -> Result<(), (usize, Refusal)> {
    let mut pending: Vec<&mut dyn Pending> = prepared
        .iter_mut()
        .map(|prepared| match &mut prepared.pending {
            PendingKind::Memory(pending) => pending as &mut dyn Pending,
            PendingKind::Cow(pending) => pending.group_member(),
        })
        .collect();
    consistency_group::take(&mut pending).map_err(|Late { at }| {
        let why = format!("origin={}: {NotInTime}", prepared[at].origin.name());
        (at, Refusal::failed(Errno::ETIMEDOUT, why))
    })?;
    prepared.iter().enumerate().try_for_each(|(at, prepared)| prepared.settle().map_err(|why| (at, why)))
}

/// A snapshot that is ready to be taken.
struct PreparedSnapshot {
    pending: PendingKind,
    origin: Arc<Entry>,
}

/// The pending part of a prepared snapshot.
enum PendingKind {
    Memory(PendingSnapshot),
    Cow(PendingCow),
}

impl SnapshotSpec {
    fn prepare(&self, name: &str, registry: &Registry) -> Result<PreparedSnapshot, Refusal> {
        let origin = registry.needed("origin", &self.origin)?;
        let refuse = |why: &str| Refusal::failed(Errno::EINVAL, format!("origin={}: {why}", self.origin));
        if let Some(taken) = registry.taken_by(&origin) {
            return Err(Refusal { errno: Errno::EBUSY, ..refuse(&taken) });
        }
        origin.kind.check_origin().map_err(refuse)?;
        // Unflushed writes of a power layer are not in the disk's pages, so such a device needs copies.
        let pages = origin.kind.ram().filter(|_| self.cow.is_none() && origin.layers.power.is_none());
        let hidden = if pages.is_some() { origin.hides() } else { origin.layers.zones_hide() };
        if let Some(why) = hidden {
            return Err(refuse(&format!("has no snapshots: {why}")));
        }
        let pending = match (pages, &origin.cow_origin) {
            (Some(ram), _) => {
                check_in_memory(self)?;
                PendingKind::Memory(ram.prepare_snapshot().map_err(family::setup_refusal)?)
            }
            (None, Some(_)) => PendingKind::Cow(PendingCow::prepare(name, self, &origin, registry)?),
            (None, None) => return Err(refuse("is read-only, so it does not change")),
        };
        Ok(PreparedSnapshot { pending, origin })
    }
}

/// Refuses keys that have no meaning for a snapshot of a RAM disk or fork without copies.
fn check_in_memory(spec: &SnapshotSpec) -> Result<(), Refusal> {
    let origin = &spec.origin;
    let why = match spec {
        SnapshotSpec { chunk_size: Some(bytes), .. } => {
            format!(
                "chunk_size={}: only with cow; without it a ram device preserves single pages",
                exact(*bytes)
            )
        }
        SnapshotSpec { readonly: Some(false), .. } => {
            "readonly=no: only with cow; without it fork the snapshot to write".to_owned()
        }
        SnapshotSpec { discard_zeroes_cow: true, .. } => "discard_zeroes_cow=yes: only with cow".to_owned(),
        SnapshotSpec { family_said: true, .. } => {
            format!("its forks are in the family of {origin}; set mem_limit and the like there")
        }
        _ => return Ok(()),
    };
    Err(Refusal::failed(Errno::EINVAL, why))
}

impl PreparedSnapshot {
    /// Flushes the origin of a persistent store. The store survives power cuts, and then needs the
    /// present content of the origin.
    fn settle(&self) -> Result<(), Refusal> {
        let (PendingKind::Cow(pending), Some(origin)) = (&self.pending, &self.origin.cow_origin) else {
            return Ok(());
        };
        if !pending.is_persistent() {
            return Ok(());
        }
        origin.flush().map_err(|error| {
            let why = format!("origin={}: could not be flushed: {error}", self.origin.name());
            Refusal::failed(Errno::EIO, why)
        })
    }

    fn finish(self) -> Built {
        let Self { pending, origin } = self;
        match pending {
            PendingKind::Memory(pending) => {
                let snapshot = Arc::new(pending.into_snapshot());
                // The snapshot keeps its content without its origin, but not without the origin's base.
                let (needs, backing) = (origin.needs().to_vec(), origin.backing.clone());
                // The number cannot change here: rewinding a fork and taking a snapshot of it claim the fork.
                let rewinds = origin.rewinds.load(Ordering::SeqCst);
                let origin: Option<(Weak<Entry>, u64)> = Some((Arc::downgrade(&origin), rewinds));
                Built {
                    needs,
                    backing,
                    origin,
                    ..Built::standalone(MemorySnapshot(Arc::clone(&snapshot)), snapshot)
                }
            }
            PendingKind::Cow(pending) => pending.finish(origin),
        }
    }
}

/// An open snapshot in memory.
pub(super) struct MemorySnapshot(pub Arc<Ram>);

impl KindInstance for MemorySnapshot {
    fn name(&self) -> &'static str {
        NAME
    }

    fn ram(&self) -> Option<&Arc<Ram>> {
        Some(&self.0)
    }

    fn memory_snapshot(&self) -> Option<&Arc<Ram>> {
        Some(&self.0)
    }

    fn check_origin(&self) -> Result<(), &'static str> {
        Err(IS_SNAPSHOT)
    }

    fn check_base(&self, _: &Entry) -> Result<(), String> {
        Ok(())
    }

    fn attrs(&self) -> &'static [&'static str] {
        &NAMES
    }

    fn value(&self, entry: &Entry, attr: &str) -> Option<Value> {
        fork::value(entry, &self.0, attr)
    }
}

/// Restrictions while a merge is running or unfinished.
impl Entry {
    /// Fails if the device is an origin with an unfinished merge.
    pub fn check_whole(&self) -> Result<(), Refusal> {
        if !self.cow_origin.as_ref().is_some_and(Origin::is_half_merged) {
            return Ok(());
        }
        let name = self.name();
        Err(Refusal::failed(Errno::EBUSY, format!("{name}: {}", self.kind.half_merged_message(name))))
    }

    /// Returns the reason why an operation on the data alone would not match what users of the device
    /// see, or None.
    pub fn hides(&self) -> Option<&'static str> {
        let merging = self.cow_origin.as_ref().is_some_and(Origin::is_merging);
        self.layers.hide().or(merging.then_some("a snapshot is being merged into it"))
    }
}

/// Attributes of a snapshot of a RAM disk or fork.
const NAMES: [&str; 7] =
    ["origin", "disksize", "comp_algorithm", "over_stat", "family", "mm_stat", "io_stat"];
