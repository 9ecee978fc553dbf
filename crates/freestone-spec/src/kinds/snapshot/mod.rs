//! Kind `snapshot`: the content of a device at one moment. Snapshots of RAM disks and forks share
//! the memory of their family. Snapshots of any device with a COW device are in [`cow`].
//! [`snapshots`] takes snapshots of several devices at one moment with a [`consistency_group`].

mod cow;
mod stack;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use freestone::consistency_group::{self, FreezeTimeout, GroupFreezeTimeout, GroupMember};
use freestone::cow::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, Origin, StoreKind};
use freestone::device::Blocking as _;
use freestone::ram::{PendingSnapshot, Ram};
use serde_json::Value;

use self::cow::PendingCow;
pub use self::cow::{CowDevice, cow_stat, merge, missed_writes};
pub use self::stack::{CutOutcome, SnapshotStack};
use super::memory::fork;
use super::registry::Registry;
use super::{
    DataDevice, Entry, ExclusiveUse, IS_SNAPSHOT, KindConfig, KindInstance, Spec, finish_entry, parse_name,
};
use crate::entries::SpecError;
use crate::family::{self, FamilySpec};
use crate::keys::{Keys, parse_bool, parse_length};
use crate::refusal::{Errno, Refusal};
use crate::size::{self, exact};
use crate::{path_text, schema};

pub(super) const NAME: &str = "snapshot";
/// Keys that are allowed only together with `cow`.
const COW_KEYS: [&str; 4] = ["cow_size", "store", "force", "merge"];

/// Specification of a device of kind `snapshot`.
#[derive(Debug, Clone, PartialEq)]
pub struct SnapshotSpec {
    /// Name of the origin, the device of which the snapshot is taken.
    pub origin: String,
    /// COW device for copies of the origin's old content. With `None`, a snapshot of a RAM disk or
    /// fork shares pages with its origin. Other snapshots then store copies on a private RAM disk.
    pub cow: Option<CowSpec>,
    /// Size in bytes of a chunk, the unit of copies, or `None` for the default.
    pub chunk_size: Option<u64>,
    /// True if the snapshot is read-only for users. `None` means read-only without `cow`, writable
    /// with it.
    pub readonly: Option<bool>,
    /// True if a discard of the snapshot zeroes the snapshot's own chunks.
    pub discard_zeroes_cow: bool,
    /// True if a discard of the snapshot is also passed to the origin.
    pub discard_passdown_origin: bool,
    /// Specification of the family (memory pool) of the snapshot's forks, and of copies in memory.
    pub family: FamilySpec,
    /// True if the specification contains a key of the family.
    pub has_family_keys: bool,
}

/// Specification of a COW device and the COW store on it.
#[derive(Debug, Clone)]
pub struct CowSpec {
    /// Location of the COW device: a file, or a device of the server.
    pub place: CowPlace,
    /// Size of the file in bytes, or `None` for its present size.
    pub size: Option<u64>,
    /// Kind of the COW store: persistent or transient.
    pub store: StoreKind,
    /// True to allow a persistent COW store even if the origin or the COW device ends with the
    /// process.
    pub force: bool,
    /// True to start merging the snapshot into its origin at once.
    pub merge: bool,
}

/// Compares all fields except `force`, which only matters when the snapshot is created.
impl PartialEq for CowSpec {
    fn eq(&self, other: &Self) -> bool {
        let Self { place, size, store, force: _, merge } = self;
        (place, size, store, merge) == (&other.place, &other.size, &other.store, &other.merge)
    }
}

impl Eq for CowSpec {}

/// Location of a COW device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CowPlace {
    /// A file or block device at this path.
    Path(PathBuf),
    /// The device of the server with this name.
    Device(String),
}

impl CowPlace {
    /// Returns the name of the COW device, or `None` if it is not a device of the server.
    fn device(&self) -> Option<&str> {
        match self {
            Self::Device(name) => Some(name),
            Self::Path(_) => None,
        }
    }
}

impl SnapshotSpec {
    pub(super) fn take(keys: &Keys) -> Result<Self, SpecError> {
        let origin = keys.need("origin", "origin=ram0", parse_name)?;
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
            has_family_keys: keys.first_of(schema::FAMILY).is_some(),
        })
    }
}

/// Parses the value of `cow`: a text with a slash is a path, one without a slash the name of a
/// device.
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
    fn build(&self, spec: &Spec, registry: &Registry) -> Result<DataDevice, Refusal> {
        let mut prepared = [self.prepare(&spec.name, registry)?];
        take_all(&mut prepared).map_err(|(_, refusal)| refusal)?;
        let [prepared] = prepared;
        Ok(prepared.finish())
    }

    fn family(&self) -> Option<&FamilySpec> {
        Some(&self.family)
    }

    fn parent_name(&self) -> Option<&str> {
        Some(&self.origin)
    }

    fn cow_device_name(&self) -> Option<&str> {
        self.cow.as_ref()?.place.device()
    }

    fn is_volatile(&self) -> bool {
        !self.cow.as_ref().is_some_and(|cow| cow.store.is_persistent())
    }

    fn exclusive_uses(&self) -> Vec<ExclusiveUse<'_>> {
        self.cow_device_name()
            .map(ExclusiveUse::of_cow_device)
            .into_iter()
            .chain(ExclusiveUse::of_backing_device(&self.family))
            .collect()
    }

    fn claimed_devices(&self) -> Vec<&str> {
        let takes = self.exclusive_uses();
        std::iter::once(self.origin.as_str()).chain(takes.iter().map(|takes| takes.name)).collect()
    }
}

/// Takes snapshots of several devices at one moment, and builds their entries.
pub fn snapshots(specs: Vec<Spec>, registry: &Registry) -> Result<Vec<Entry>, Refusal> {
    let mut prepared = Vec::with_capacity(specs.len());
    let mut taken = HashSet::new();
    for spec in &specs {
        if let Some(twice) =
            spec.kind.exclusive_uses().iter().find(|takes| !taken.insert(takes.name.to_owned()))
        {
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

/// Takes all prepared snapshots at one moment. An error contains the index of the snapshot that
/// failed.
fn take_all(prepared: &mut [PreparedSnapshot]) -> Result<(), (usize, Refusal)> {
    let mut pending: Vec<&mut dyn GroupMember> = prepared
        .iter_mut()
        .map(|prepared| match &mut prepared.pending {
            PendingKind::Memory(pending) => pending as &mut dyn GroupMember,
            PendingKind::Cow(pending) => pending.group_member(),
        })
        .collect();
    consistency_group::take_snapshots(&mut pending).map_err(|GroupFreezeTimeout { index }| {
        (index, refusal!(ETIMEDOUT, "origin={}: {FreezeTimeout}", prepared[index].origin.name()))
    })?;
    prepared.iter().enumerate().try_for_each(|(at, prepared)| prepared.settle().map_err(|why| (at, why)))
}

/// Snapshot that is ready to be taken.
struct PreparedSnapshot {
    pending: PendingKind,
    origin: Arc<Entry>,
}

/// Kind-specific part of a prepared snapshot: in memory, or with a COW device.
enum PendingKind {
    Memory(PendingSnapshot),
    Cow(PendingCow),
}

impl SnapshotSpec {
    fn prepare(&self, name: &str, registry: &Registry) -> Result<PreparedSnapshot, Refusal> {
        let origin = registry.find_required("origin", &self.origin)?;
        let refuse = |why: &str| refusal!(EINVAL, "origin={}: {why}", self.origin);
        if let Some(taken) = registry.exclusive_user(&origin) {
            return Err(Refusal { errno: Errno::EBUSY, ..refuse(&taken) });
        }
        origin.kind.check_origin().map_err(refuse)?;
        // With a power layer, unflushed writes are not in the RAM disk's pages, so the snapshot
        // cannot share pages and needs copies.
        let pages = origin.kind.ram().filter(|_| self.cow.is_none() && origin.layers.power.is_none());
        let hidden =
            if pages.is_some() { origin.bypass_obstacle() } else { origin.layers.zones_bypass_obstacle() };
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

/// Refuses keys that do not apply to a snapshot that shares pages with a RAM disk or fork.
fn check_in_memory(spec: &SnapshotSpec) -> Result<(), Refusal> {
    let origin = &spec.origin;
    match spec {
        SnapshotSpec { chunk_size: Some(bytes), .. } => {
            let why = "only with cow; without it a ram device preserves single pages";
            refuse!(EINVAL, "chunk_size={}: {why}", exact(*bytes))
        }
        SnapshotSpec { readonly: Some(false), .. } => {
            refuse!(EINVAL, "readonly=no: only with cow; without it fork the snapshot to write")
        }
        SnapshotSpec { discard_zeroes_cow: true, .. } => {
            refuse!(EINVAL, "discard_zeroes_cow=yes: only with cow")
        }
        SnapshotSpec { has_family_keys: true, .. } => {
            refuse!(EINVAL, "its forks are in the family of {origin}; set mem_limit and the like there")
        }
        _ => Ok(()),
    }
}

impl PreparedSnapshot {
    /// Flushes the origin if the COW store is persistent. Such a store survives power cuts, and
    /// then needs the present content of the origin.
    fn settle(&self) -> Result<(), Refusal> {
        let (PendingKind::Cow(pending), Some(origin)) = (&self.pending, &self.origin.cow_origin) else {
            return Ok(());
        };
        if !pending.is_persistent() {
            return Ok(());
        }
        origin
            .flush()
            .map_err(|error| refusal!(EIO, "origin={}: could not be flushed: {error}", self.origin.name()))
    }

    fn finish(self) -> DataDevice {
        let Self { pending, origin } = self;
        match pending {
            PendingKind::Memory(pending) => {
                let snapshot = Arc::new(pending.into_snapshot());
                // The snapshot keeps its content when its origin is removed, but it depends on the
                // origin's base.
                let (dependencies, backing) = (origin.dependencies().to_vec(), origin.backing.clone());
                // `rewinds` cannot change meanwhile, because rewinding a fork and taking a snapshot
                // of it both claim the fork.
                let rewinds = origin.rewinds.load(Ordering::SeqCst);
                let origin: Option<(Weak<Entry>, u64)> = Some((Arc::downgrade(&origin), rewinds));
                DataDevice {
                    dependencies,
                    backing,
                    origin,
                    ..DataDevice::standalone(MemorySnapshot(Arc::clone(&snapshot)), snapshot)
                }
            }
            PendingKind::Cow(pending) => pending.finish(origin),
        }
    }
}

/// Open snapshot in memory, which shares pages with its origin.
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

/// Restrictions on operations while a merge into the device is running or unfinished.
impl Entry {
    /// Fails if a merge of a snapshot into this device was started but not finished.
    pub fn check_no_unfinished_merge(&self) -> Result<(), Refusal> {
        if !self.cow_origin.as_ref().is_some_and(Origin::is_half_merged) {
            return Ok(());
        }
        let name = self.name();
        refuse!(EBUSY, "{name}: {}", self.kind.half_merged_message(name))
    }

    /// Returns the reason why an operation on the data without its layers would miss content that
    /// users of the device see. Returns `None` if it would not.
    pub fn bypass_obstacle(&self) -> Option<&'static str> {
        let merging = self.cow_origin.as_ref().is_some_and(Origin::is_merging);
        self.layers.bypass_obstacle().or(merging.then_some("a snapshot is being merged into it"))
    }
}

/// Names of the attributes of a snapshot in memory.
const NAMES: [&str; 7] =
    ["origin", "disksize", "comp_algorithm", "over_stat", "family", "mm_stat", "io_stat"];
