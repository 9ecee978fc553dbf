//! Creation of a snapshot. Everything that can fail or take long happens before the origin's gate
//! is closed for a short time.

use std::sync::Arc;

use super::origin::{Anchor, Origin};
use super::snapshot::Snapshot;
use crate::cow::exceptions::{CHUNKS_MAX, Exceptions};
use crate::cow::notes::Stamp;
use crate::cow::state::{Merging, OriginCore, Snap};
use crate::cow::store::format::HeaderContent;
use crate::cow::store::load;
use crate::cow::store::{self, Store};
use crate::cow::{Config, MissedWrites, SetupError, StoreKind};
use freestone_core::consistency_group::{self, FreezeTimeout, GroupMember};
use freestone_core::device::{Device, Geometry};
use freestone_core::slot::{Common, LOCATION_BITS};
use freestone_core::sync::Instant;

/// Snapshot that is prepared but not yet attached to its origin. If it is dropped, a store that was
/// newly created on the COW device remains there, empty.
pub struct PendingSnapshot {
    snapshot: Snapshot,
    anchor: Arc<Anchor>,
    frozen: bool,
    attached: bool,
    previous: PreviousStore,
}

/// State of the COW device before the store was opened.
#[derive(Clone, Copy)]
enum PreviousStore {
    /// No store, or an invalid or transient store.
    None,
    /// Valid store. Contains the version of the origin's content at the orderly close, if recorded.
    Valid(Option<Stamp>),
}

impl PreviousStore {
    fn missed_writes(self, core: &OriginCore) -> MissedWrites {
        match self {
            Self::None => MissedWrites::Nothing,
            Self::Valid(closed) => core.content_version.missed_writes(closed),
        }
    }
}

impl Origin {
    /// Opens or creates the exception store on `cow`. [`consistency_group::take_snapshots`] then
    /// attaches the snapshot. Blocks.
    ///
    /// If a merge of the store was interrupted, the snapshot serves the origin's requests from the
    /// start, and the merge is [stopped](crate::cow::MergeStatus::Stopped). Until [`Snapshot::merge`]
    /// resumes the merge, other existing stores of the origin can be opened, but new stores cannot
    /// be created.
    /// # Errors
    /// [`SetupError`]. The COW device is unchanged, except that creating a new store may have
    /// started.
    pub fn prepare_snapshot(
        &self,
        cow: Arc<dyn Device>,
        config: &Config,
    ) -> Result<PendingSnapshot, SetupError> {
        let core = &self.0.0;
        let origin = core.device.geometry();
        let cow_geometry = cow.geometry();
        check(&origin, &cow_geometry, config)?;
        if is_same_device(&cow, &core.device) {
            return Err(SetupError::SameDevice);
        }
        // After an error, dropping the guard releases the COW device.
        let mut preparation = Preparation::new(core, &cow)?;
        let noted = core.noted_merge_id();
        let found = load::read_header(&*cow)?;
        preparation.check_merging(config.kind, noted, found)?;
        let previous = match found {
            Some(HeaderContent::Store { valid: true, closed, .. }) if config.kind.is_persistent() => {
                PreviousStore::Valid(closed)
            }
            _ => PreviousStore::None,
        };
        if !config.force && previous.missed_writes(core) == MissedWrites::Writes {
            return Err(SetupError::OriginChanged);
        }
        core.work_queue.start().map_err(SetupError::Thread)?;
        core.extents_queue.start().map_err(SetupError::Thread)?;
        let common = if let Some(common) = core.common.get() {
            Arc::clone(common)
        } else {
            let new = Arc::new(Common::new().map_err(|errno| SetupError::MemoryFile(errno.into()))?);
            Arc::clone(core.common.get_or_init(|| new))
        };
        if config.kind.is_persistent() {
            core.content_version.note_in_use(core.notes.as_deref());
        }
        let (store, loaded) = Store::open(cow, config.kind, config.chunk_bytes, &origin)?;
        preparation.resume_merge(&store, loaded.is_empty(), noted)?;
        let chunk = store.chunk_bytes();
        limit("origin", origin.size, chunk, CHUNKS_MAX)?;
        limit("COW device", cow_geometry.size, chunk, 1 << LOCATION_BITS)?;
        let exceptions =
            Exceptions::new(common, origin.size.div_ceil(chunk)).map_err(|_| SetupError::NoMemory)?;
        for (old, new) in loaded {
            exceptions.load(old, new).map_err(|_| SetupError::NoMemory)?;
        }
        let snap = Snap::new(core, store, exceptions, *config, &origin);
        let snapshot = Snapshot::new(snap, Arc::clone(&self.0));
        preparation.keep_reserved();
        Ok(PendingSnapshot {
            snapshot,
            anchor: Arc::clone(&self.0),
            frozen: false,
            attached: false,
            previous,
        })
    }

    /// Takes a snapshot of the origin's present content. Blocks until no write is in flight.
    ///
    /// # Errors
    /// Errors of [`prepare_snapshot`](Self::prepare_snapshot), and [`SetupError::FreezeTimeout`].
    pub fn snapshot(&self, cow: Arc<dyn Device>, config: &Config) -> Result<Snapshot, SetupError> {
        let mut pending = self.prepare_snapshot(cow, config)?;
        consistency_group::take_snapshots(&mut [&mut pending])
            .map_err(|_| SetupError::FreezeTimeout(FreezeTimeout))?;
        Ok(pending.into_snapshot())
    }
}

/// Reserves a COW device while its snapshot is prepared.
struct Preparation<'a> {
    core: &'a OriginCore,
    cow: Option<Arc<dyn Device>>,
    has_interrupted_merge: bool,
}

impl<'a> Preparation<'a> {
    fn new(core: &'a OriginCore, cow: &Arc<dyn Device>) -> Result<Self, SetupError> {
        let mut setup = core.setup.lock();
        if setup.merging == Merging::Yes {
            return Err(SetupError::Merging);
        }
        let view = core.gate.value();
        let begun = view.snapshots.iter().chain(&view.merging).map(|snap| snap.store.device());
        if begun.chain(&setup.preparing).any(|other| is_same_device(other, cow)) {
            return Err(SetupError::InUse);
        }
        setup.preparing.push(Arc::clone(cow));
        Ok(Self { core, cow: Some(Arc::clone(cow)), has_interrupted_merge: false })
    }

    /// Rejects a new snapshot of a half-merged origin, and a transient store on the COW device of
    /// an interrupted merge.
    fn check_merging(
        &self,
        kind: StoreKind,
        noted: Option<u64>,
        found: Option<HeaderContent>,
    ) -> Result<(), SetupError> {
        let is_interrupted = self.core.setup.lock().merging == Merging::Interrupted;
        let is_old = kind.is_persistent() && found != Some(HeaderContent::New);
        match found {
            _ if is_interrupted && !is_old => Err(SetupError::Merging),
            _ if noted.is_some() && !is_old => Err(SetupError::HalfMerged),
            Some(HeaderContent::Store { valid: true, mark: Some(_), .. }) if !kind.is_persistent() => {
                Err(SetupError::HalfMerged)
            }
            _ => Ok(()),
        }
    }

    /// Prepares to resume the interrupted merge that the store's header records, or removes the
    /// mark of a complete merge.
    fn resume_merge(&mut self, store: &Store, is_empty: bool, noted: Option<u64>) -> Result<(), SetupError> {
        let Some(id) = store.merge_id() else { return Ok(()) };
        if noted.is_some_and(|noted| noted != id) {
            return Err(SetupError::OtherMerge);
        }
        if is_empty {
            // All exceptions are in the origin: the process crashed before the mark was removed, or
            // a kernel finished the merge.
            let recorded = self.core.notes.as_ref().filter(|_| noted.is_some());
            // The store must not be used with its mark: a new exception in a marked store would be
            // merged into the origin.
            if recorded.is_some_and(|recorded| !recorded.remove_merge()) {
                return Err(SetupError::MergeNoteRemains);
            }
            return store.unmark_merge().map_err(|error| match error {
                store::MergeError::Device(source) => SetupError::Device { what: "writing", source },
                _ => SetupError::Mark,
            });
        }
        let mut setup = self.core.setup.lock();
        if setup.merging != Merging::No {
            return Err(SetupError::Merging);
        }
        setup.merging = Merging::Interrupted;
        self.has_interrupted_merge = true;
        Ok(())
    }

    /// Keeps the COW device reserved until the snapshot is attached.
    fn keep_reserved(mut self) {
        self.cow = None;
    }
}

impl Drop for Preparation<'_> {
    fn drop(&mut self) {
        if let Some(cow) = &self.cow {
            self.core.end_preparation(cow, self.has_interrupted_merge);
        }
    }
}

impl OriginCore {
    /// Ends the preparation of a COW device. `abandons_merge` is true if no snapshot for an
    /// interrupted merge is open any more.
    fn end_preparation(&self, cow: &Arc<dyn Device>, abandons_merge: bool) {
        let mut setup = self.setup.lock();
        setup.preparing.retain(|other| !is_same_device(other, cow));
        if abandons_merge {
            setup.merging = Merging::No;
        }
    }
}

fn is_same_device(device: &Arc<dyn Device>, other: &Arc<dyn Device>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(device), Arc::as_ptr(other))
}

fn check(origin: &Geometry, cow: &Geometry, config: &Config) -> Result<(), SetupError> {
    if config.discard_passdown_origin && !config.discard_zeroes_cow {
        return Err(SetupError::Passdown);
    }
    if origin.zones.is_some() {
        return Err(SetupError::Zoned("origin"));
    }
    if !origin.size.is_multiple_of(u64::from(cow.logical_block)) {
        return Err(SetupError::OddSize { size: origin.size, block: cow.logical_block });
    }
    if config.kind.is_persistent() && !(config.force || config.may_end) {
        for (geometry, whose) in [(origin, "origin"), (cow, "COW device")] {
            if geometry.volatile_media {
                return Err(SetupError::Volatile(whose));
            }
        }
    }
    Ok(())
}

fn limit(whose: &'static str, size: u64, chunk: u64, chunks: u64) -> Result<(), SetupError> {
    if size.div_ceil(chunk) > chunks {
        return Err(SetupError::TooLarge { whose, size, chunk, max: chunks.saturating_mul(chunk) });
    }
    Ok(())
}

impl PendingSnapshot {
    /// Sets the location of the exception store, for messages.
    #[must_use]
    pub fn with_location(self, place: impl Into<String>) -> Self {
        // The location is not set yet, because no other handle to the snapshot exists.
        let _ = self.snapshot.0.snap.location.set(place.into());
        self
    }

    /// Returns the snapshot, which must be attached.
    ///
    /// # Panics
    /// If [`consistency_group::take_snapshots`] was not called first.
    pub fn into_snapshot(self) -> Snapshot {
        assert!(self.attached, "into_snapshot requires consistency_group::take_snapshots first");
        self.snapshot.clone()
    }

    fn core(&self) -> &OriginCore {
        &self.anchor.0
    }
}

impl GroupMember for PendingSnapshot {
    fn may_wait_for_disk(&self) -> bool {
        true
    }

    fn freeze(&mut self, until: Instant) -> Result<(), FreezeTimeout> {
        if !self.frozen {
            self.frozen = true;
            if !self.core().gate.close_within(until.saturating_duration_since(Instant::now())) {
                self.thaw();
                return Err(FreezeTimeout);
            }
        }
        Ok(())
    }

    fn attach(&mut self) {
        if !self.attached {
            self.attached = true;
            let snap = &self.snapshot.0.snap;
            let core = self.core();
            // Determined before the snapshot is attached: later writes to the origin are preserved
            // for the snapshot.
            let missed_writes = self.previous.missed_writes(core);
            let _ = snap.missed_writes.set(missed_writes);
            if snap.is_merging() {
                core.announce_merge();
            }
            core.gate.change(|view| {
                view.changed(|view| {
                    if snap.is_merging() {
                        view.merging = Some(snap.clone());
                    } else {
                        view.snapshots.push(snap.clone());
                    }
                })
            });
            core.end_preparation(self.snapshot.cow(), false);
            log_missed(snap, missed_writes);
        }
    }

    fn thaw(&mut self) {
        if std::mem::take(&mut self.frozen) {
            for task in self.core().gate.open() {
                self.core().work_queue.push(task);
            }
        }
    }
}

impl Drop for PendingSnapshot {
    fn drop(&mut self) {
        self.thaw();
        if !self.attached {
            self.core().end_preparation(self.snapshot.cow(), self.snapshot.0.snap.is_merging());
        }
    }
}

/// Logs a warning if the store missed, or may have missed, writes of the origin before it was
/// opened.
fn log_missed(snap: &Snap, missed_writes: MissedWrites) {
    let store = snap.location.get().map_or("an exception store", |location| location);
    match missed_writes {
        MissedWrites::Nothing => {}
        MissedWrites::Unknown => tracing::warn!(
            "{store}: it is unknown whether the origin was written without this store since; then its snapshot is a mixture"
        ),
        MissedWrites::Writes => tracing::warn!(
            "{store}: the origin was written or used without this store since; its snapshot is a mixture of old and new"
        ),
    }
}
