//! How a snapshot begins: all that can fail or take long is done before, then the origin's gate is closed for a moment.

use std::sync::Arc;
use std::time::Instant;

use super::exceptions::{CHUNKS_MAX, Exceptions};
use super::origin::{Anchor, Core, Origin};
use super::snapshot::{Snap, Snapshot};
use super::store::Store;
use super::{Config, SetupError};
use crate::device::{Device, Geometry};
use crate::moment::{self, NotInTime, Pending};
use crate::slot::{Common, LOCATION_BITS};

/// A snapshot that is ready and has not begun. One that never begins leaves an empty store on the COW device, if that was new.
pub struct PendingSnapshot {
    snapshot: Snapshot,
    anchor: Arc<Anchor>,
    frozen: bool,
    attached: bool,
}

impl Origin {
    /// Opens or makes the exception store on `cow`. The snapshot then begins with [`moment::take`]. Blocks.
    ///
    /// # Errors
    /// [`SetupError`]; the COW device is as it was, except that a new store may have been begun on it.
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
        // Given back when this fails.
        let preparing = Preparing::new(core, &cow)?;
        core.runner.start().map_err(SetupError::Thread)?;
        let common = if let Some(common) = core.common.get() {
            Arc::clone(common)
        } else {
            let new = Arc::new(Common::new().map_err(|_| SetupError::NoMemory)?);
            Arc::clone(core.common.get_or_init(|| new))
        };
        let (store, loaded) = Store::open(cow, config.kind, config.chunk_bytes, &origin)?;
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
        Ok(PendingSnapshot { snapshot, anchor: Arc::clone(&self.0), frozen: false, attached: false })
    }

    /// A snapshot of what the origin holds now. Blocks until no write to the origin is under way.
    ///
    /// # Errors
    /// As [`prepare_snapshot`](Self::prepare_snapshot); [`SetupError::NotInTime`].
    pub fn snapshot(&self, cow: Arc<dyn Device>, config: &Config) -> Result<Snapshot, SetupError> {
        let mut pending = self.prepare_snapshot(cow, config)?;
        moment::take(&mut [&mut pending]).map_err(|_| SetupError::NotInTime(NotInTime))?;
        Ok(pending.into_snapshot())
    }
}

/// A COW device is noted as being prepared.
struct Preparing<'a> {
    core: &'a Core,
    cow: Option<Arc<dyn Device>>,
}

impl<'a> Preparing<'a> {
    fn new(core: &'a Core, cow: &Arc<dyn Device>) -> Result<Self, SetupError> {
        let mut changing = core.changing.lock();
        if changing.merging {
            return Err(SetupError::Merging);
        }
        let view = core.gate.value();
        let begun = view.snapshots.iter().map(|snap| snap.store.device());
        if begun.chain(&changing.preparing).any(|other| is_same(other, cow)) {
            return Err(SetupError::InUse);
        }
        changing.preparing.push(Arc::clone(cow));
        Ok(Self { core, cow: Some(Arc::clone(cow)) })
    }

    /// It stays so until the snapshot has begun.
    fn kept(mut self) {
        self.cow = None;
    }
}

impl Drop for Preparing<'_> {
    fn drop(&mut self) {
        if let Some(cow) = &self.cow {
            self.core.prepared(cow);
        }
    }
}

impl Core {
    /// The snapshot on this COW device has begun, or never will.
    fn prepared(&self, cow: &Arc<dyn Device>) {
        self.changing.lock().preparing.retain(|other| !is_same(other, cow));
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
    if config.kind.is_persistent() && !config.force {
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
    /// The snapshot, once it has begun.
    ///
    /// # Panics
    /// If it has not: [`moment::take`] comes first.
    pub fn into_snapshot(self) -> Snapshot {
        assert!(self.attached, "into_snapshot comes after moment::take");
        self.snapshot.clone()
    }

    fn core(&self) -> &Core {
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
            core.gate.change(|view| view.changed(|view| view.snapshots.push(snap.clone())));
            core.prepared(self.snapshot.cow());
        }
    }

    fn thaw(&mut self) {
        if std::mem::take(&mut self.frozen) {
            for task in self.core().gate.open() {
                self.core().runner.push(task);
            }
        }
    }
}

impl Drop for PendingSnapshot {
    fn drop(&mut self) {
        self.thaw();
        if !self.attached {
            self.core().prepared(self.snapshot.cow());
        }
    }
}
