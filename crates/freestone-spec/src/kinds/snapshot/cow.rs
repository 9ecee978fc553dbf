//! Snapshots with stores, as dm-snapshot keeps them, of any device.

use std::sync::{Arc, Weak};

use freestone::consistency_group::Pending;
use freestone::cow::{self, MergeStatus};
use freestone::device::Device;
use freestone::file;
use freestone::quiesce::Quiesce;
use freestone::ram::{DISKSIZE_BYTES_MAX, Family, Ram};
use serde_json::{Value, json};
use tracing::warn;

use super::super::registry::Registry;
use super::super::taken::keeps_nothing;
use super::super::{Built, Entry, IS_SNAPSHOT, KindSpec, Made, Takes};
use super::{CowPlace, NAME, SnapshotSpec};
use crate::family;
use crate::files::open;
use crate::keys::joined;
use crate::path_text;
use crate::refusal::{Errno, Refusal};
use freestone::view::ReadOnly;

/// One that is ready.
pub(super) struct PendingCow {
    pending: cow::PendingSnapshot,
    device: CowDevice,
    read_only: bool,
    persistent: bool,
    below: Below,
}

/// What a snapshot stands on beside its origin.
struct Below {
    /// The COW device, where it is one of the server.
    cow: Option<Arc<Entry>>,
    /// The one that takes pages of its family.
    backing: Option<Arc<Entry>>,
}

impl PendingCow {
    pub(super) fn group(&mut self) -> &mut dyn Pending {
        &mut self.pending
    }

    pub(super) fn prepare(
        name: &str,
        asked: &SnapshotSpec,
        origin: &Arc<Entry>,
        registry: &Registry,
    ) -> Result<Self, Refusal> {
        let (config, device, below) = device(name, asked, origin, registry)?;
        Self::on(asked, origin, &config, device, below)
    }

    /// The same on the COW device of a snapshot that lost its power.
    pub(super) fn again(asked: &SnapshotSpec, origin: &Arc<Entry>, old: &Entry) -> Result<Self, Refusal> {
        let Some((snapshot, device)) = old.kind.cow().zip(old.kind.cow_device()) else {
            unreachable!("only such snapshots come here")
        };
        let cow = asked.cow.as_ref().and_then(|cow| cow.place.device());
        let cow = old.needs().iter().find(|needed| Some(needed.name()) == cow).cloned();
        let below = Below { cow, backing: old.backing.clone() };
        let device = CowDevice::new(Arc::clone(&device.device), None);
        Self::on(asked, origin, &snapshot.config(), device, below)
    }

    fn on(
        asked: &SnapshotSpec,
        origin: &Arc<Entry>,
        config: &cow::Config,
        device: CowDevice,
        below: Below,
    ) -> Result<Self, Refusal> {
        let Some(origin) = &origin.cow_origin else { unreachable!("asked before") };
        let pending = prepare(asked, origin, config, &device)?;
        let read_only = asked.readonly.unwrap_or(asked.cow.is_none());
        let persistent = asked.cow.as_ref().is_some_and(|cow| cow.store.is_persistent());
        Ok(Self { pending, device, read_only, persistent, below })
    }

    /// Whether its store is to outlive the server, or a loss of power.
    pub(super) fn is_persistent(&self) -> bool {
        self.persistent
    }

    pub(super) fn finish(self, origin: Arc<Entry>) -> Built {
        let Self { pending, device: on, read_only, below: Below { cow, backing }, .. } = self;
        let needs = cow.into_iter().chain([origin]).collect();
        let snapshot = pending.into_snapshot();
        let device: Arc<dyn Device> = Arc::new(snapshot.clone());
        let device = if read_only { Arc::new(ReadOnly(device)) } else { device };
        Built { needs, backing, ..Built::alone(CowSnapshot(snapshot, on), device) }
    }
}

/// What takes the copies of a snapshot, and what cuts the snapshot off from it.
pub struct CowDevice {
    device: Arc<dyn Device>,
    /// What the snapshot has of it.
    pub(super) lead: Arc<Quiesce>,
    /// The same, where no COW device was given.
    in_memory: Option<Ram>,
}

impl CowDevice {
    fn new(device: Arc<dyn Device>, in_memory: Option<Ram>) -> Self {
        let lead = Arc::new(Quiesce::new(Arc::clone(&device)));
        Self { device, lead, in_memory }
    }
}

/// Where its copies go, and what that stands on.
fn device(
    name: &str,
    asked: &SnapshotSpec,
    below: &Arc<Entry>,
    registry: &Registry,
) -> Result<(cow::Config, CowDevice, Below), Refusal> {
    let mut config = cow::Config {
        kind: cow::StoreKind::Transient,
        chunk_bytes: asked.chunk_size,
        discard_zeroes_cow: asked.discard_zeroes_cow,
        discard_passdown_origin: asked.discard_passdown_origin,
        force: true,
        // What only the power takes away, a store outlives.
        may_end: below.layers.can_cut,
    };
    let mut on = Below { cow: None, backing: registry.backing(&asked.family)? };
    let mut in_memory = None;
    let device: Arc<dyn Device> = match &asked.cow {
        None => {
            config.chunk_bytes = Some(chunk_in_memory(asked));
            let copies = private_cow(name, asked, below.size(), registry, on.backing.as_ref())?;
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
                    let (entry, device) = cow_device(&asked.origin, cow_name, cow.store, registry)?;
                    config.may_end |= entry.layers.can_cut;
                    on.cow = Some(entry);
                    device
                }
            }
        }
    };
    Ok((config, CowDevice::new(device, in_memory), on))
}

fn prepare(
    asked: &SnapshotSpec,
    origin: &cow::Origin,
    config: &cow::Config,
    device: &CowDevice,
) -> Result<cow::PendingSnapshot, Refusal> {
    let place = match asked.cow.as_ref().map(|cow| &cow.place) {
        Some(CowPlace::Path(path)) => path.display().to_string(),
        Some(CowPlace::Device(name)) => name.clone(),
        None => String::new(),
    };
    let lead = Arc::clone(&device.lead) as Arc<dyn Device>;
    let pending = origin.prepare_snapshot(lead, config).map_err(|error| {
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
        let hint = if matches!(error, cow::SetupError::Older) { " (force=yes)" } else { "" };
        Refusal::failed(errno, format!("{at}{error}{hint}"))
    })?;
    Ok(pending.at(place))
}

/// Memory has pages.
fn chunk_in_memory(asked: &SnapshotSpec) -> u64 {
    asked.chunk_size.unwrap_or(cow::CHUNK_BYTES_MIN)
}

/// Room in memory for the copies of an origin of `size` bytes: a disk of the family in which the
/// snapshot's forks will be.
fn private_cow(
    name: &str,
    asked: &SnapshotSpec,
    size: u64,
    registry: &Registry,
    backing: Option<&Arc<Entry>>,
) -> Result<Ram, Refusal> {
    let chunk = chunk_in_memory(asked);
    let disksize = size.next_multiple_of(chunk).saturating_add(chunk).min(DISKSIZE_BYTES_MAX);
    let family = registry.new_family(name, &asked.family, disksize, backing)?;
    family.ram(disksize).map_err(family::refused)
}

/// A device of the server that takes copies, and is nobody else's.
fn cow_device(
    origin: &str,
    name: &str,
    store: cow::StoreKind,
    registry: &Registry,
) -> Result<(Arc<Entry>, Arc<dyn Device>), Refusal> {
    let takes = Takes::copies(name);
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

/// What an origin held at one moment.
struct CowSnapshot(cow::Snapshot, CowDevice);

impl Made for CowSnapshot {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cow(&self) -> Option<&cow::Snapshot> {
        Some(&self.0)
    }

    fn copies(&self) -> Option<&Ram> {
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
        // From then on it changes with its origin.
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

    fn closes(&self) -> Option<Weak<dyn Device>> {
        Some(Arc::downgrade(self.0.cow()))
    }

    fn begin_merge(&self, entry: &Arc<Entry>, registry: &Registry) -> Result<(), Refusal> {
        let KindSpec::Snapshot(spec) = &entry.spec.kind else { return Ok(()) };
        let (name, origin) = (entry.name(), &spec.origin);
        let asked = spec.cow.as_ref().is_some_and(|cow| cow.merge);
        match self.0.merge_status() {
            MergeStatus::Stopped if !asked => {
                warn!("{name}: its merge into {origin} was under way, and goes on (merge=yes)");
            }
            MergeStatus::Stopped => {}
            MergeStatus::None if asked => {}
            _ => return Ok(()),
        }
        registry.check_unused(entry, "merged")?;
        let begun = self.0.merge();
        begun.map_err(|error| Refusal::failed(Errno::EBUSY, format!("{name}: merge: {error}")))
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
            _ => return entry.family_value(attr),
        })
    }
}

/// Attributes of such a snapshot, and those of its forks' family.
const NAMES: [&str; 15] = joined(&OWN_NAMES, &family::NAMES, &[]);
const OWN_NAMES: [&str; 9] =
    ["origin", "size", "readonly", "cow", "store", "chunk_size", "status", "missed_writes", "cow_stat"];

/// Whether a snapshot missed writes of its origin before it was opened.
pub fn missed_writes(snapshot: &cow::Snapshot) -> Value {
    json!(match snapshot.missed_writes() {
        cow::Missed::Nothing => "no",
        cow::Missed::Unknown => "unknown",
        cow::Missed::Writes => "yes",
    })
}

/// What a snapshot with copies did.
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

/// How far a merge is; `None` where none was begun.
pub fn merge(status: &cow::MergeStatus) -> Option<Value> {
    Some(match status {
        cow::MergeStatus::None => return None,
        cow::MergeStatus::Running => json!("running"),
        cow::MergeStatus::Stopped => json!("stopped"),
        cow::MergeStatus::Finished => json!("finished"),
        cow::MergeStatus::Failed(why) => json!(format!("failed: {why}")),
    })
}
