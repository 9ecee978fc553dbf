//! How a snapshot begins: all that can fail or take long is done before, then the origin's gate is
//! closed for a moment.

use std::sync::Arc;

use super::exceptions::{CHUNKS_MAX, Exceptions};
use super::format::Found;
use super::notes::Stamp;
use super::origin::{Anchor, Origin};
use super::snapshot::Snapshot;
use super::state::{Merging, OriginCore, Snap};
use super::store::{self, Store};
use super::store_load;
use super::{Config, Missed, SetupError, StoreKind};
use freestone_core::consistency_group::{self, NotInTime, Pending};
use freestone_core::device::{Device, Geometry};
use freestone_core::slot::{Common, LOCATION_BITS};
use freestone_core::sync::Instant;

/// A snapshot that is ready and has not begun. One that never begins leaves an empty store on the
/// COW device, if that was new.
pub struct PendingSnapshot {
    snapshot: Snapshot,
    anchor: Arc<Anchor>,
    frozen: bool,
    attached: bool,
    before: Before,
}

/// What was on the COW device.
#[derive(Clone, Copy)]
enum Before {
    /// No store, or none that counts.
    New,
    /// A store, with the origin's content when it was closed in order.
    There(Option<Stamp>),
}

impl Before {
    fn missed(self, core: &OriginCore) -> Missed {
        match self {
            Self::New => Missed::Nothing,
            Self::There(closed) => core.age.missed(closed),
        }
    }
}

impl Origin {
    /// Opens or makes the exception store on `cow`. The snapshot then begins with
    /// [`consistency_group::take`]. Blocks.
    ///
    /// A store whose merge was under way gives a snapshot that plays the origin's part from the
    /// first moment on, and whose merge is [stopped](super::MergeStatus::Stopped). Until
    /// [`Snapshot::merge`] goes on with it, other stores of the origin that were there before can
    /// be opened, but no new ones.
    ///
    /// # Errors
    /// [`SetupError`]; the COW device is as it was, except that a new store may have been begun on
    /// it.
    pub fn prepare_snapshot(
        &self,
        cow: Arc<dyn Device>,
        config: &Config,
    ) -> Result<PendingSnapshot, SetupError> {
        let core = &self.0.0;
        let origin = core.device.geometry();
        let cow_geometry = cow.geometry();
        check(&origin, &cow_geometry, config)?;
        if is_same(&cow, &core.device) {
            return Err(SetupError::SameDevice);
        }
        // Undone when this fails.
        let mut preparing = Preparing::new(core, &cow)?;
        let noted = core.noted_merge();
        let found = store_load::look(&*cow)?;
        preparing.check_merging(config.kind, noted, found)?;
        let before = match found {
            Some(Found::Store { valid: true, closed, .. }) if config.kind.is_persistent() => {
                Before::There(closed)
            }
            _ => Before::New,
        };
        if !config.force && before.missed(core) == Missed::Writes {
            return Err(SetupError::Older);
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
            core.age.has_store(core.notes.as_deref());
        }
        let (store, loaded) = Store::open(cow, config.kind, config.chunk_bytes, &origin)?;
        preparing.take_up(&store, loaded.is_empty(), noted)?;
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
        preparing.kept();
        Ok(PendingSnapshot { snapshot, anchor: Arc::clone(&self.0), frozen: false, attached: false, before })
    }

    /// A snapshot of what the origin holds now. Blocks until no write to the origin is under way.
    ///
    /// # Errors
    /// As [`prepare_snapshot`](Self::prepare_snapshot); [`SetupError::NotInTime`].
    pub fn snapshot(&self, cow: Arc<dyn Device>, config: &Config) -> Result<Snapshot, SetupError> {
        let mut pending = self.prepare_snapshot(cow, config)?;
        consistency_group::take(&mut [&mut pending]).map_err(|_| SetupError::NotInTime(NotInTime))?;
        Ok(pending.into_snapshot())
    }
}

/// Lists a COW device as being prepared for a snapshot.
struct Preparing<'a> {
    core: &'a OriginCore,
    cow: Option<Arc<dyn Device>>,
    /// The store's merge, which was under way, was taken up.
    merging: bool,
}

impl<'a> Preparing<'a> {
    fn new(core: &'a OriginCore, cow: &Arc<dyn Device>) -> Result<Self, SetupError> {
        let mut changing = core.changing.lock();
        if changing.merging == Merging::Yes {
            return Err(SetupError::Merging);
        }
        let view = core.gate.value();
        let begun = view.snapshots.iter().chain(&view.merging).map(|snap| snap.store.device());
        if begun.chain(&changing.preparing).any(|other| is_same(other, cow)) {
            return Err(SetupError::InUse);
        }
        changing.preparing.push(Arc::clone(cow));
        Ok(Self { core, cow: Some(Arc::clone(cow)), merging: false })
    }

    /// Refuses a snapshot that would begin with what is half merged, and what would overwrite the
    /// store of a merge.
    fn check_merging(
        &self,
        kind: StoreKind,
        noted: Option<u64>,
        found: Option<Found>,
    ) -> Result<(), SetupError> {
        let taken_up = self.core.changing.lock().merging == Merging::TakenUp;
        let is_old = kind.is_persistent() && found != Some(Found::New);
        match found {
            _ if taken_up && !is_old => Err(SetupError::Merging),
            _ if noted.is_some() && !is_old => Err(SetupError::HalfMerged),
            Some(Found::Store { valid: true, mark: Some(_), .. }) if !kind.is_persistent() => {
                Err(SetupError::HalfMerged)
            }
            _ => Ok(()),
        }
    }

    /// Takes up the merge that is under way by the store's header.
    fn take_up(&mut self, store: &Store, is_empty: bool, noted: Option<u64>) -> Result<(), SetupError> {
        let Some(id) = store.merge_id() else { return Ok(()) };
        if noted.is_some_and(|noted| noted != id) {
            return Err(SetupError::OtherMerge);
        }
        if is_empty {
            // All of it is in the origin: a crash came before the mark was removed, or a kernel
            // finished the merge.
            let beside = self.core.notes.as_ref().filter(|_| noted.is_some());
            // A new exception in a store with a mark would be merged into the origin.
            if beside.is_some_and(|beside| !beside.merge_ended()) {
                return Err(SetupError::NoteStays);
            }
            return store.unmark_merge().map_err(|error| match error {
                store::MergeError::Device(source) => SetupError::Device { what: "writing", source },
                _ => SetupError::Mark,
            });
        }
        let mut changing = self.core.changing.lock();
        if changing.merging != Merging::No {
            return Err(SetupError::Merging);
        }
        changing.merging = Merging::TakenUp;
        self.merging = true;
        Ok(())
    }

    /// The COW device stays listed until the snapshot has begun.
    fn kept(mut self) {
        self.cow = None;
    }
}

impl Drop for Preparing<'_> {
    fn drop(&mut self) {
        if let Some(cow) = &self.cow {
            self.core.prepared(cow, self.merging);
        }
    }
}

impl OriginCore {
    /// The snapshot on this COW device has begun, or never will (`gives_up`: a merge that it took
    /// up has no snapshot then).
    fn prepared(&self, cow: &Arc<dyn Device>, gives_up: bool) {
        let mut changing = self.changing.lock();
        changing.preparing.retain(|other| !is_same(other, cow));
        if gives_up {
            changing.merging = Merging::No;
        }
    }
}

/// Whether two handles are of one device.
fn is_same(one: &Arc<dyn Device>, other: &Arc<dyn Device>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
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
    /// Says where the store is, for people.
    #[must_use]
    pub fn at(self, place: impl Into<String>) -> Self {
        // Nobody else knows the snapshot yet.
        let _ = self.snapshot.0.snap.place.set(place.into());
        self
    }

    /// The snapshot, once it has begun.
    ///
    /// # Panics
    /// If it has not: [`consistency_group::take`] comes first.
    pub fn into_snapshot(self) -> Snapshot {
        assert!(self.attached, "into_snapshot comes after consistency_group::take");
        self.snapshot.clone()
    }

    fn core(&self) -> &OriginCore {
        &self.anchor.0
    }
}

impl Pending for PendingSnapshot {
    fn waits_for_disk(&self) -> bool {
        true
    }

    fn freeze(&mut self, until: Instant) -> Result<(), NotInTime> {
        if !self.frozen {
            self.frozen = true;
            if !self.core().gate.close_within(until.saturating_duration_since(Instant::now())) {
                self.thaw();
                return Err(NotInTime);
            }
        }
        Ok(())
    }

    fn attach(&mut self) {
        if !self.attached {
            self.attached = true;
            let snap = &self.snapshot.0.snap;
            let core = self.core();
            // From now on writes are preserved for it.
            let missed = self.before.missed(core);
            let _ = snap.missed.set(missed);
            if snap.is_merging() {
                core.will_merge();
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
            core.prepared(self.snapshot.cow(), false);
            log_missed(snap, missed);
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
            self.core().prepared(self.snapshot.cow(), self.snapshot.0.snap.is_merging());
        }
    }
}

/// Logs what its store missed before it was opened.
fn log_missed(snap: &Snap, missed: Missed) {
    let store = snap.place.get().map_or("an exception store", |place| place);
    match missed {
        Missed::Nothing => {}
        Missed::Unknown => tracing::warn!(
            "{store}: it is unknown whether the origin was written without this store since; then its snapshot is a mixture"
        ),
        Missed::Writes => tracing::warn!(
            "{store}: the origin was written or used without this store since; its snapshot is a mixture of old and new"
        ),
    }
}
