//! Snapshots of a file, as dm-snapshot keeps them.

use std::sync::{Arc, Weak};

use freestone::consistency_group::Pending;
use freestone::cow::{self, MergeStatus};
use freestone::device::Device;
use freestone::file;
use freestone::ram::{DISKSIZE_BYTES_MAX, Family, Ram};
use serde_json::{Value, json};
use tracing::warn;

use super::super::registry::Registry;
use super::super::{Built, Entry, IS_SNAPSHOT, KindSpec, Made, Source};
use super::{CowPlace, NAME, SnapshotSpec};
use crate::family;
use crate::files::open;
use crate::keys::joined;
use crate::path_text;
use crate::readonly::ReadOnly;
use crate::refusal::{Errno, Refusal};

/// One that is ready.
pub(super) struct PendingCow {
    pending: cow::PendingSnapshot,
    read_only: bool,
    needs: Vec<Arc<Entry>>,
    copies: Option<Ram>,
}

impl PendingCow {
    pub(super) fn group(&mut self) -> &mut dyn Pending {
        &mut self.pending
    }

    pub(super) fn prepare(
        name: &str,
        asked: &SnapshotSpec,
        origin: &cow::Origin,
        registry: &Registry,
    ) -> Result<Self, Refusal> {
        let copies = match &asked.cow {
            Some(_) => None,
            None => Some(private_cow(name, asked, origin.geometry().size, registry)?),
        };
        let (pending, needs) = prepare(asked, origin, copies.as_ref(), registry)?;
        let read_only = asked.readonly.unwrap_or(asked.cow.is_none());
        Ok(Self { pending, read_only, needs, copies })
    }

    pub(super) fn finish(self, origin: Arc<Entry>) -> Built {
        let Self { pending, read_only, mut needs, copies } = self;
        needs.push(origin);
        let snapshot = pending.into_snapshot();
        let device: Arc<dyn Device> = Arc::new(snapshot.clone());
        let device = if read_only { Arc::new(ReadOnly(device)) } else { device };
        Built { needs, ..Built::alone(FileSnapshot { snapshot, copies }, device) }
    }
}

fn prepare(
    asked: &SnapshotSpec,
    origin: &cow::Origin,
    copies: Option<&Ram>,
    registry: &Registry,
) -> Result<(cow::PendingSnapshot, Vec<Arc<Entry>>), Refusal> {
    let mut config = cow::Config {
        kind: cow::StoreKind::Transient,
        chunk_bytes: asked.chunk_size,
        discard_zeroes_cow: asked.discard_zeroes_cow,
        discard_passdown_origin: asked.discard_passdown_origin,
        force: true,
    };
    let mut needs = Vec::new();
    let device: Arc<dyn Device> = match (&asked.cow, copies) {
        (None, copies) => {
            config.chunk_bytes = Some(chunk_in_memory(asked));
            Arc::new(copies.ok_or_else(|| Refusal::failed(Errno::EINVAL, "no memory for copies"))?.clone())
        }
        (Some(cow), _) => {
            (config.kind, config.force) = (cow.store, cow.force);
            match &cow.place {
                CowPlace::Path(path) => {
                    let mut file = file::Config::new(path);
                    file.size = cow.size;
                    Arc::new(open(&file, "cow_size").map_err(|e| e.of("cow"))?)
                }
                CowPlace::Device(name) => {
                    let (entry, device) = cow_device(&asked.origin, name, registry)?;
                    needs.push(entry);
                    device
                }
            }
        }
    };
    let place = match asked.cow.as_ref().map(|cow| &cow.place) {
        Some(CowPlace::Path(path)) => path.display().to_string(),
        Some(CowPlace::Device(name)) => name.clone(),
        None => String::new(),
    };
    let pending = origin.prepare_snapshot(device, &config).map_err(|error| {
        let errno = match error {
            cow::SetupError::InUse
            | cow::SetupError::Merging
            | cow::SetupError::HalfMerged
            | cow::SetupError::OtherMerge => Errno::EBUSY,
            cow::SetupError::NoMemory | cow::SetupError::Thread(_) => Errno::ENOMEM,
            cow::SetupError::Device { .. } | cow::SetupError::Damaged(_) => Errno::EIO,
            _ => Errno::EINVAL,
        };
        let at = if place.is_empty() { String::new() } else { format!("cow={place}: ") };
        let hint = if matches!(error, cow::SetupError::Older) { " (force=yes)" } else { "" };
        Refusal::failed(errno, format!("{at}{error}{hint}"))
    })?;
    Ok((pending.at(place), needs))
}

/// Memory has pages.
fn chunk_in_memory(asked: &SnapshotSpec) -> u64 {
    asked.chunk_size.unwrap_or(cow::CHUNK_BYTES_MIN)
}

/// Room in memory for the copies of a file of `size` bytes: a disk of the family in which the
/// snapshot's forks will be.
fn private_cow(name: &str, asked: &SnapshotSpec, size: u64, registry: &Registry) -> Result<Ram, Refusal> {
    let chunk = chunk_in_memory(asked);
    let disksize = size.next_multiple_of(chunk).saturating_add(chunk).min(DISKSIZE_BYTES_MAX);
    let family = registry.new_family(name, &asked.family, disksize)?;
    family.ram(disksize).map_err(family::refused)
}

/// A device of the server that takes copies, and is nobody else's.
fn cow_device(
    origin: &str,
    name: &str,
    registry: &Registry,
) -> Result<(Arc<Entry>, Arc<dyn Device>), Refusal> {
    let refuse = |errno, why: &str| Err(Refusal::failed(errno, format!("cow={name}: {why}")));
    let entry = registry.needed("cow", name).map_err(|error| {
        let slash = format!("{}; a file is written with a slash, ./{name}", error.sentence);
        Refusal { sentence: slash, ..error }
    })?;
    if name == origin {
        return refuse(Errno::EINVAL, "is the origin itself");
    }
    let device = match entry.device() {
        Some(device) if entry.kind.takes_copies() && !entry.is_read_only() => Arc::clone(device),
        _ => return refuse(Errno::EINVAL, "copies need a ram, fork or file device that can be written"),
    };
    if device.geometry().padding > 0 {
        return refuse(
            Errno::EINVAL,
            "its file ends within a block, so copies cannot be stored up to its end",
        );
    }
    if let Some(why) = entry.layers.hide() {
        return refuse(Errno::EINVAL, &format!("takes no copies: {why}"));
    }
    if let Some(users) = registry.users(&entry) {
        return refuse(Errno::EBUSY, &format!("is in use by {users}"));
    }
    Ok((entry, device))
}

/// What a file held at one moment.
struct FileSnapshot {
    snapshot: cow::Snapshot,
    /// In memory, where no COW device was given.
    copies: Option<Ram>,
}

impl Made for FileSnapshot {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cow(&self) -> Option<&cow::Snapshot> {
        Some(&self.snapshot)
    }

    fn copies(&self) -> Option<&Ram> {
        self.copies.as_ref()
    }

    fn own_family(&self) -> Option<Family> {
        self.copies.as_ref().map(Ram::family)
    }

    fn source(&self) -> Result<Source<'_>, &'static str> {
        Err(IS_SNAPSHOT)
    }

    fn check_base(&self, base: &Entry) -> Result<(), String> {
        // From then on it changes with its origin.
        if self.snapshot.merge_status() != MergeStatus::None {
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
        Some(Arc::downgrade(self.snapshot.cow()))
    }

    fn begin_merge(&self, entry: &Arc<Entry>, registry: &Registry) -> Result<(), Refusal> {
        let KindSpec::Snapshot(spec) = &entry.spec.kind else { return Ok(()) };
        let (name, origin) = (entry.name(), &spec.origin);
        let asked = spec.cow.as_ref().is_some_and(|cow| cow.merge);
        match self.snapshot.merge_status() {
            MergeStatus::Stopped if !asked => {
                warn!("{name}: its merge into {origin} was under way, and goes on (merge=yes)");
            }
            MergeStatus::Stopped => {}
            MergeStatus::None if asked => {}
            _ => return Ok(()),
        }
        registry.check_unused(entry, "merged")?;
        let begun = self.snapshot.merge();
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
            "store" => json!(self.snapshot.kind().to_string()),
            "chunk_size" => json!(self.snapshot.chunk_bytes()),
            "status" => json!(self.snapshot.status().to_string()),
            "missed_writes" => missed_writes(&self.snapshot),
            "cow_stat" => cow_stat(&self.snapshot),
            _ => return entry.family_value(attr),
        })
    }
}

/// Attributes of a snapshot of a file, and those of its forks' family.
const NAMES: [&str; 15] = joined(&OWN_NAMES, &family::NAMES, &[]);
const OWN_NAMES: [&str; 9] =
    ["origin", "size", "readonly", "cow", "store", "chunk_size", "status", "missed_writes", "cow_stat"];

/// Whether a file's snapshot missed writes of its origin before it was opened.
pub fn missed_writes(snapshot: &cow::Snapshot) -> Value {
    json!(match snapshot.missed_writes() {
        cow::Missed::Nothing => "no",
        cow::Missed::Unknown => "unknown",
        cow::Missed::Writes => "yes",
    })
}

/// What a file's snapshot did.
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
