//! Snapshots of any device with a COW device, which stores the copies, as in dm-snapshot.

use std::sync::Arc;

use freestone::consistency_group::GroupMember;
use freestone::cow::{self, MergeStatus};
use freestone::device::{Device, DropObserver};
use freestone::file;
use freestone::quiesce::Quiesce;
use freestone::ram::{DISKSIZE_BYTES_MAX, Family, Ram};
use serde_json::{Value, json};
use tracing::warn;

use super::super::exclusive::keeps_nothing;
use super::super::registry::Registry;
use super::super::{DataDevice, Entry, ExclusiveUse, IS_SNAPSHOT, KindInstance, KindSpec};
use super::{CowPlace, NAME, SnapshotSpec};
use crate::family;
use crate::files::open;
use crate::path_text;
use crate::refusal::{Errno, Refusal};
use freestone::view::ReadOnly;

/// Snapshot with a COW device that is ready to be taken.
pub(super) struct PendingCow {
    pending: cow::PendingSnapshot,
    device: CowDevice,
    read_only: bool,
    persistent: bool,
    dependencies: Dependencies,
}

/// Devices on which a snapshot depends, except its origin.
struct Dependencies {
    /// COW device, if it is a device of the server.
    cow: Option<Arc<Entry>>,
    /// Backing device of the family, if it is a device of the server.
    backing: Option<Arc<Entry>>,
}

impl PendingCow {
    /// Returns the part of the snapshot that takes part in a consistency group.
    pub(super) fn group_member(&mut self) -> &mut dyn GroupMember {
        &mut self.pending
    }

    /// Opens the COW device of a new snapshot and prepares the snapshot.
    pub(super) fn prepare(
        name: &str,
        spec: &SnapshotSpec,
        origin: &Arc<Entry>,
        registry: &Registry,
    ) -> Result<Self, Refusal> {
        let (config, device, dependencies) = open_device(name, spec, origin, registry)?;
        Self::with_device(spec, origin, &config, device, dependencies)
    }

    /// Prepares the snapshot `old` again after a power cut, on the same COW device.
    pub(super) fn reopen(spec: &SnapshotSpec, origin: &Arc<Entry>, old: &Entry) -> Result<Self, Refusal> {
        let Some((snapshot, device)) = old.kind.cow().zip(old.kind.cow_device()) else {
            unreachable!("the caller passes snapshots with stores")
        };
        let cow = spec.cow.as_ref().and_then(|cow| cow.place.device());
        let cow = old.dependencies().iter().find(|needed| Some(needed.name()) == cow).cloned();
        let dependencies = Dependencies { cow, backing: old.backing.clone() };
        let device = CowDevice::new(Arc::clone(&device.device), None);
        Self::with_device(spec, origin, &snapshot.config(), device, dependencies)
    }

    fn with_device(
        spec: &SnapshotSpec,
        origin: &Arc<Entry>,
        config: &cow::Config,
        device: CowDevice,
        dependencies: Dependencies,
    ) -> Result<Self, Refusal> {
        let Some(origin) = &origin.cow_origin else { unreachable!("the caller checked the origin") };
        let pending = prepare(spec, origin, config, &device)?;
        let read_only = spec.readonly.unwrap_or(spec.cow.is_none());
        let persistent = spec.cow.as_ref().is_some_and(|cow| cow.store.is_persistent());
        Ok(Self { pending, device, read_only, persistent, dependencies })
    }

    /// Returns true if the copies on the COW device survive the end of the server and power cuts.
    pub(super) fn is_persistent(&self) -> bool {
        self.persistent
    }

    pub(super) fn finish(self, origin: Arc<Entry>) -> DataDevice {
        let Self {
            pending, device: cow_device, read_only, dependencies: Dependencies { cow, backing }, ..
        } = self;
        let dependencies = cow.into_iter().chain([origin]).collect();
        let snapshot = pending.into_snapshot();
        let device: Arc<dyn Device> = Arc::new(snapshot.clone());
        let device = if read_only { Arc::new(ReadOnly(device)) } else { device };
        DataDevice {
            dependencies,
            backing,
            ..DataDevice::standalone(CowSnapshot(snapshot, cow_device), device)
        }
    }
}

/// Device that stores the copies of a snapshot, and the gate between the snapshot and this device.
pub struct CowDevice {
    device: Arc<dyn Device>,
    /// Gate through which the snapshot accesses the device. A power cut closes it.
    pub(super) gate: Arc<Quiesce>,
    /// The device itself, if it is a private RAM disk of the snapshot.
    in_memory: Option<Ram>,
}

impl CowDevice {
    fn new(device: Arc<dyn Device>, in_memory: Option<Ram>) -> Self {
        let gate = Arc::new(Quiesce::new(Arc::clone(&device)));
        Self { device, gate, in_memory }
    }
}

/// Opens the device that stores the copies. Also returns the settings of the COW store and the
/// dependencies.
fn open_device(
    name: &str,
    spec: &SnapshotSpec,
    origin: &Arc<Entry>,
    registry: &Registry,
) -> Result<(cow::Config, CowDevice, Dependencies), Refusal> {
    let mut config = cow::Config {
        kind: cow::StoreKind::Transient,
        chunk_bytes: spec.chunk_size,
        discard_zeroes_cow: spec.discard_zeroes_cow,
        discard_passdown_origin: spec.discard_passdown_origin,
        force: true,
        // With power cuts, a persistent store is useful even if the device ends with the process.
        may_end: origin.layers.can_cut,
    };
    let mut dependencies = Dependencies { cow: None, backing: registry.backing(&spec.family)? };
    let mut in_memory = None;
    let device: Arc<dyn Device> = match &spec.cow {
        None => {
            config.chunk_bytes = Some(chunk_in_memory(spec));
            let copies = private_cow(name, spec, origin.size(), registry, dependencies.backing.as_ref())?;
            in_memory = Some(copies.clone());
            Arc::new(copies)
        }
        Some(cow) => {
            (config.kind, config.force) = (cow.store, cow.force);
            match &cow.place {
                CowPlace::Path(path) => {
                    let mut file = file::Config::new(path);
                    file.size = cow.size;
                    Arc::new(open(&file, "cow_size").map_err(|e| e.of("cow"))?)
                }
                CowPlace::Device(cow_name) => {
                    let (entry, device) = cow_device(&spec.origin, cow_name, cow.store, registry)?;
                    // An adopted device has outlived a process, with the store.
                    config.may_end |= entry.layers.can_cut || entry.is_adopted;
                    dependencies.cow = Some(entry);
                    device
                }
            }
        }
    };
    Ok((config, CowDevice::new(device, in_memory), dependencies))
}

fn prepare(
    spec: &SnapshotSpec,
    origin: &cow::Origin,
    config: &cow::Config,
    device: &CowDevice,
) -> Result<cow::PendingSnapshot, Refusal> {
    let place = match spec.cow.as_ref().map(|cow| &cow.place) {
        Some(CowPlace::Path(path)) => path.display().to_string(),
        Some(CowPlace::Device(name)) => name.clone(),
        None => String::new(),
    };
    let gate = Arc::clone(&device.gate) as Arc<dyn Device>;
    let pending = origin.prepare_snapshot(gate, config).map_err(|error| {
        let errno = match error {
            cow::SetupError::InUse
            | cow::SetupError::Merging
            | cow::SetupError::HalfMerged
            | cow::SetupError::OtherMerge => Errno::EBUSY,
            cow::SetupError::NoMemory | cow::SetupError::Thread(_) => Errno::ENOMEM,
            cow::SetupError::Device { .. } | cow::SetupError::MemoryFile(_) | cow::SetupError::Damaged(_) => {
                Errno::EIO
            }
            _ => Errno::EINVAL,
        };
        let at = if place.is_empty() { String::new() } else { format!("cow={place}: ") };
        let hint = if matches!(error, cow::SetupError::OriginChanged) { " (force=yes)" } else { "" };
        Refusal::failed(errno, format!("{at}{error}{hint}"))
    })?;
    let location = if place.is_empty() { format!("copies in memory of {}", spec.origin) } else { place };
    Ok(pending.with_location(location))
}

/// Returns the chunk size in bytes of copies in memory. The default is a page.
fn chunk_in_memory(spec: &SnapshotSpec) -> u64 {
    spec.chunk_size.unwrap_or(cow::CHUNK_BYTES_MIN)
}

/// Creates the private RAM disk that stores the copies of an origin of `size` bytes. The disk
/// starts the family of the snapshot's forks.
fn private_cow(
    name: &str,
    spec: &SnapshotSpec,
    size: u64,
    registry: &Registry,
    backing: Option<&Arc<Entry>>,
) -> Result<Ram, Refusal> {
    let chunk = chunk_in_memory(spec);
    let disksize = size.next_multiple_of(chunk).saturating_add(chunk).min(DISKSIZE_BYTES_MAX);
    let family = registry.new_family(name, &spec.family, disksize, backing, false)?;
    family.ram(disksize).map_err(family::setup_refusal)
}

/// Finds the device `name`, and checks that it can be a COW device and is not used by another
/// device.
fn cow_device(
    origin: &str,
    name: &str,
    store: cow::StoreKind,
    registry: &Registry,
) -> Result<(Arc<Entry>, Arc<dyn Device>), Refusal> {
    let takes = ExclusiveUse::of_cow_device(name);
    if name == origin {
        return Err(takes.refuse(Errno::EINVAL, "is the origin itself"));
    }
    let (entry, device) = takes.find(registry).map_err(|error| {
        if error.errno != Errno::ENODEV {
            return error;
        }
        let slash = format!("{}; a file is written with a slash, ./{name}", error.sentence);
        Refusal { sentence: slash, ..error }
    })?;
    if store.is_persistent() && keeps_nothing(&entry) {
        let why = "keeps nothing of what is written; use a transient store (N), or memory_backed=1";
        return Err(takes.refuse(Errno::EINVAL, why));
    }
    takes.check_free(&entry, registry)?;
    Ok((entry, device))
}

/// Open snapshot with a COW device or private RAM disk.
struct CowSnapshot(cow::Snapshot, CowDevice);

impl KindInstance for CowSnapshot {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cow(&self) -> Option<&cow::Snapshot> {
        Some(&self.0)
    }

    fn cow_ram(&self) -> Option<&Ram> {
        self.1.in_memory.as_ref()
    }

    fn own_family(&self) -> Option<Family> {
        self.1.in_memory.as_ref().map(Ram::family)
    }

    fn cow_device(&self) -> Option<&CowDevice> {
        Some(&self.1)
    }

    fn check_origin(&self) -> Result<(), &'static str> {
        Err(IS_SNAPSHOT)
    }

    fn check_base(&self, base: &Entry) -> Result<(), String> {
        // During a merge the snapshot changes together with its origin.
        if self.0.merge_status() != MergeStatus::None {
            return Err("is merged into its origin; take another snapshot".into());
        }
        if base.is_read_only() {
            return Ok(());
        }
        Err("is a snapshot that its users write (readonly=no); take one with readonly=yes".into())
    }

    fn is_outer_base(&self, read_only: bool) -> bool {
        read_only
    }

    fn drop_observer(&self) -> Option<DropObserver> {
        Some(self.0.drop_observer())
    }

    fn begin_merge(&self, entry: &Arc<Entry>, registry: &Registry) -> Result<(), Refusal> {
        let KindSpec::Snapshot(spec) = &entry.spec.kind else { return Ok(()) };
        let (name, origin) = (entry.name(), &spec.origin);
        let requested = spec.cow.as_ref().is_some_and(|cow| cow.merge);
        match self.0.merge_status() {
            MergeStatus::Stopped if !requested => {
                warn!("{name}: continues its unfinished merge into {origin} (merge=yes)");
            }
            MergeStatus::Stopped => {}
            MergeStatus::None if requested => {}
            _ => return Ok(()),
        }
        registry.check_unused(entry, "merged")?;
        let begun = self.0.merge();
        begun.map_err(|error| refusal!(EBUSY, "{name}: merge: {error}"))
    }

    fn attrs(&self) -> &'static [&'static str] {
        &NAMES
    }

    fn value(&self, entry: &Entry, attr: &str) -> Option<Value> {
        let KindSpec::Snapshot(spec) = &entry.spec.kind else { return None };
        Some(match attr {
            "origin" => json!(spec.origin),
            "size" => json!(entry.size()),
            "readonly" => json!(entry.is_read_only()),
            "cow" => match spec.cow.as_ref().map(|cow| &cow.place) {
                None => json!("none"),
                Some(CowPlace::Device(name)) => json!(name),
                Some(CowPlace::Path(path)) => json!(path_text::text(path)),
            },
            "store" => json!(self.0.kind().to_string()),
            "chunk_size" => json!(self.0.chunk_bytes()),
            "status" => json!(self.0.status().to_string()),
            "missed_writes" => missed_writes(&self.0),
            "cow_stat" => cow_stat(&self.0),
            _ => return None,
        })
    }
}

const NAMES: [&str; 9] =
    ["origin", "size", "readonly", "cow", "store", "chunk_size", "status", "missed_writes", "cow_stat"];

/// Returns "yes", "no" or "unknown": whether the origin was written while the snapshot was not
/// open.
pub fn missed_writes(snapshot: &cow::Snapshot) -> Value {
    json!(match snapshot.missed_writes() {
        cow::MissedWrites::Nothing => "no",
        cow::MissedWrites::Unknown => "unknown",
        cow::MissedWrites::Writes => "yes",
    })
}

/// Returns the statistics of a snapshot with a COW device, as a JSON object.
pub fn cow_stat(snapshot: &cow::Snapshot) -> Value {
    let s = snapshot.stats();
    json!({
        "copied_chunks": s.copied_chunks,
        "full_chunk_writes": s.full_chunk_writes,
        "origin_writes_waited": s.origin_writes_waited,
        "origin_reads": s.origin_reads,
        "rereads": s.rereads,
        "exceptions": s.exceptions,
        "commits": s.commits,
        "largest_commit": s.largest_commit,
    })
}

/// Returns the state of the merge of a snapshot into its origin, or `None` if none was started.
pub fn merge(status: &cow::MergeStatus) -> Option<Value> {
    Some(match status {
        cow::MergeStatus::None => return None,
        cow::MergeStatus::Running => json!("running"),
        cow::MergeStatus::Stopped => json!("stopped"),
        cow::MergeStatus::Finished => json!("finished"),
        cow::MergeStatus::Failed(why) => json!(format!("failed: {why}")),
    })
}
