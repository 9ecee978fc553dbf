//! Records of the pages that change after a save.

use std::sync::{Arc, Weak};

use crate::ram::device::snapshot::PendingSnapshot;
use crate::ram::device::{Inner, Ram};
use crate::ram::geometry::PAGE;
use crate::ram::memory::layer::stored;
use freestone_core::slot::chain::Dirty;

/// A weak handle to a device: does not keep the device in memory.
pub struct WeakRam(Weak<Inner>);

impl WeakRam {
    /// Returns true if this handle refers to the device `ram`.
    pub fn is(&self, ram: &Ram) -> bool {
        // Comparing addresses is enough: while the weak handle exists, no other device can have
        // this address.
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&ram.0))
    }

    /// Returns the device; `None` if it was removed.
    pub fn get(&self) -> Option<Ram> {
        self.0.upgrade().map(Ram)
    }
}

/// Records of the pages that change in a live device.
pub trait TrackChanges {
    /// Returns a weak handle to the device.
    fn downgrade(&self) -> WeakRam;

    /// Sets the record of changed pages; `None` ends the recording. Returns the previous record.
    fn track_changes(&self, dirty: Option<Arc<Dirty>>) -> Option<Arc<Dirty>>;

    /// Returns the record of changed pages; `None` without a recording.
    fn dirty(&self) -> Option<Arc<Dirty>>;
}

/// Records of the pages that change after a snapshot of a device.
pub trait TrackSnapshot {
    /// Sets the record into which the origin's writers add the pages that change after the snapshot
    /// is taken.
    fn track_changes(&mut self, dirty: Arc<Dirty>);

    /// Returns the record of changed pages that was replaced when the snapshot was taken; `None` if
    /// the origin had none.
    fn take_changes(&mut self) -> Option<Arc<Dirty>>;
}

impl TrackChanges for Ram {
    fn downgrade(&self) -> WeakRam {
        WeakRam(Arc::downgrade(&self.0))
    }

    fn track_changes(&self, dirty: Option<Arc<Dirty>>) -> Option<Arc<Dirty>> {
        self.0.chain.get().replace_dirty(dirty)
    }

    fn dirty(&self) -> Option<Arc<Dirty>> {
        self.0.chain.get().dirty()
    }
}

impl TrackSnapshot for PendingSnapshot {
    fn track_changes(&mut self, dirty: Arc<Dirty>) {
        self.dirty = Some(dirty);
    }

    fn take_changes(&mut self) -> Option<Arc<Dirty>> {
        self.dirty.take()
    }
}

impl Ram {
    /// Returns the uncompressed bytes of the pages changed since a `Keep` of `freestone-save` last
    /// saved the device; after a rewind, of all pages. `None` if the device was never saved. Does
    /// not scan the pages.
    pub fn unsaved_bytes(&self) -> Option<u64> {
        let dirty = self.0.chain.get().dirty()?;
        let changed = if dirty.is_everything() { self.0.layer().get(stored::PAGES) } else { dirty.pages() };
        Some(changed * PAGE)
    }
}
