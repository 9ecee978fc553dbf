//! Snapshots: of any number of devices at one moment.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use freestone::consistency_group::{self, Late, NotInTime, Pending};
use freestone::cow;
use freestone::device::Device;
use freestone::file;
use freestone::ram::{self, DISKSIZE_BYTES_MAX, PendingSnapshot, Ram};

use super::{family, find, open};
use crate::entry::{Entry, Kind};
use crate::machine;
use crate::readonly::ReadOnly;
use crate::refusal::{Errno, Refusal};
use crate::registry::Registry;
use crate::size::exact;
use crate::spec::{CowPlace, CowSpec, KindSpec, SnapshotSpec, Spec};

/// Snapshots of all of these, at one moment.
pub fn snapshots(specs: Vec<Spec>, registry: &Registry) -> Result<Vec<Entry>, Refusal> {
    let mut begun = Vec::with_capacity(specs.len());
    for spec in specs {
        let name = spec.name.clone();
        begun.push(prepare(spec, registry).map_err(|error| error.of(&name))?);
    }
    let mut pending: Vec<&mut dyn Pending> = begun
        .iter_mut()
        .map(|begun| match &mut begun.pending {
            Which::Ram(pending) => pending as &mut dyn Pending,
            Which::Cow(pending) => pending,
        })
        .collect();
    if let Err(Late { at }) = consistency_group::take(&mut pending) {
        let Begun { spec, origin, .. } = &begun[at];
        let why = format!("{}: origin={}: {NotInTime}", spec.name, origin.name());
        return Err(Refusal::failed(Errno::ETIMEDOUT, why));
    }
    Ok(begun.into_iter().map(Begun::finish).collect())
}

/// A snapshot that is ready.
struct Begun {
    spec: Spec,
    pending: Which,
    read_only: bool,
    needs: Vec<Arc<Entry>>,
    origin: Arc<Entry>,
}

enum Which {
    Ram(PendingSnapshot),
    Cow(cow::PendingSnapshot),
}

fn prepare(spec: Spec, registry: &Registry) -> Result<Begun, Refusal> {
    let KindSpec::Snapshot(asked) = &spec.kind else { unreachable!("only snapshots come here") };
    let origin = find(registry, "origin", &asked.origin)?;
    let refuse = |why: &str| Err(Refusal::failed(Errno::EINVAL, format!("origin={}: {why}", asked.origin)));
    if let Some(why) = origin.layers.hide() {
        return refuse(&format!("has no snapshots: {why}"));
    }
    match &origin.kind {
        Kind::Ram(ram) | Kind::Fork(ram) => {
            check_in_memory(asked)?;
            let pending = Which::Ram(ram.prepare_snapshot().map_err(family::refused)?);
            // It holds what it shows, also without its origin, but not what that stands on.
            let needs = origin.needs().to_vec();
            Ok(Begun { spec, pending, read_only: true, needs, origin })
        }
        Kind::File(_, Some(of_file)) => {
            let (pending, mut needs) = prepare_cow(asked, of_file, registry)?;
            needs.push(Arc::clone(&origin));
            let read_only = asked.readonly.unwrap_or(asked.cow.is_none());
            Ok(Begun { spec, pending: Which::Cow(pending), read_only, needs, origin })
        }
        Kind::Snapshot(_) | Kind::Cow(_) => refuse("is a snapshot, which does not change; fork it"),
        Kind::File(_, None) | Kind::Qcow2(_) => refuse("is read-only, so it does not change; fork it"),
        Kind::Null(_) => refuse("a null device has no snapshots"),
        Kind::Template(_) => refuse("a template has no content; take a snapshot of a fork"),
    }
}

/// Refuses what means nothing for a snapshot of a RAM disk or fork.
fn check_in_memory(asked: &SnapshotSpec) -> Result<(), Refusal> {
    let origin = &asked.origin;
    let why = match asked {
        SnapshotSpec { cow: Some(CowSpec { place, .. }), .. } => {
            let place = match place {
                CowPlace::Path(path) => path.display().to_string(),
                CowPlace::Device(name) => name.clone(),
            };
            format!("cow={place}: only for a file; copies of a ram device stay in its family's memory")
        }
        SnapshotSpec { chunk_size: Some(bytes), .. } => {
            format!("chunk_size={}: only for a file; a ram device preserves single pages", exact(*bytes))
        }
        SnapshotSpec { readonly: Some(false), .. } => {
            "readonly=no: a snapshot of a ram device is read; fork it to write".to_owned()
        }
        SnapshotSpec { discard_zeroes_cow: true, .. } => "discard_zeroes_cow=yes: only for a file".to_owned(),
        SnapshotSpec { family_said: true, .. } => {
            format!("its forks are in the family of {origin}; set mem_limit and the like there")
        }
        _ => return Ok(()),
    };
    Err(Refusal::failed(Errno::EINVAL, why))
}

fn prepare_cow(
    asked: &SnapshotSpec,
    origin: &cow::Origin,
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
    let device: Arc<dyn Device> = match &asked.cow {
        None => {
            // Memory has pages.
            let chunk = asked.chunk_size.unwrap_or(cow::CHUNK_BYTES_MIN);
            config.chunk_bytes = Some(chunk);
            Arc::new(private_cow(origin.geometry().size, chunk)?)
        }
        Some(cow) => {
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

/// Room in memory for the copies of a file of `size` bytes.
fn private_cow(size: u64, chunk: u64) -> Result<Ram, Refusal> {
    let disksize = size.next_multiple_of(chunk).saturating_add(chunk).min(DISKSIZE_BYTES_MAX);
    let mem_limit = machine::half_of_memory().map_err(|e| Refusal::failed(Errno::EIO, e))?;
    Ram::new(ram::Config { disksize, mem_limit, ..ram::Config::default() }).map_err(family::refused)
}

/// A device of the server that takes copies, and is nobody else's.
fn cow_device(
    origin: &str,
    name: &str,
    registry: &Registry,
) -> Result<(Arc<Entry>, Arc<dyn Device>), Refusal> {
    let refuse = |errno, why: &str| Err(Refusal::failed(errno, format!("cow={name}: {why}")));
    let entry = find(registry, "cow", name).map_err(|error| {
        let slash = format!("{}; a file is written with a slash, ./{name}", error.sentence);
        Refusal { sentence: slash, ..error }
    })?;
    if name == origin {
        return refuse(Errno::EINVAL, "is the origin itself");
    }
    let taken = matches!(entry.kind, Kind::Ram(_) | Kind::Fork(_) | Kind::File(..));
    let device = match entry.device() {
        Some(device) if taken && !entry.is_read_only() => Arc::clone(device),
        _ => return refuse(Errno::EINVAL, "copies need a ram, fork or file device that can be written"),
    };
    if let Some(why) = entry.layers.hide() {
        return refuse(Errno::EINVAL, &format!("takes no copies: {why}"));
    }
    if let Some(users) = registry.users(&entry) {
        return refuse(Errno::EBUSY, &format!("is in use by {users}"));
    }
    Ok((entry, device))
}

impl Begun {
    fn finish(self) -> Entry {
        let Self { spec, pending, read_only, needs, origin } = self;
        match pending {
            Which::Ram(pending) => {
                let snapshot = Arc::new(pending.into_snapshot());
                let kind = Kind::Snapshot(Arc::clone(&snapshot));
                let mut entry = Entry::new(spec, kind, Some(snapshot), needs);
                // Whoever rewinds a fork has it claimed, as has who takes a snapshot of it.
                entry.origin = Some((Arc::downgrade(&origin), origin.rewinds.load(Ordering::SeqCst)));
                entry
            }
            Which::Cow(pending) => {
                let snapshot = pending.into_snapshot();
                let device: Arc<dyn Device> = Arc::new(snapshot.clone());
                let device = if read_only { Arc::new(ReadOnly(device)) } else { device };
                Entry::new(spec, Kind::Cow(snapshot), Some(device), needs)
            }
        }
    }
}
