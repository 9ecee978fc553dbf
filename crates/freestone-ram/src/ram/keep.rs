//! Change tracking of a device that is saved to a directory, and other access for
//! [`keep`](crate::keep).

use std::sync::{Arc, Weak};

use super::layer::stored;
use super::{Family, Inner, PAGE, Ram};
use freestone_core::slot::chain::Dirty;

/// A weak handle to a device: does not keep the device in memory.
pub(crate) struct WeakRam(Weak<Inner>);

impl WeakRam {
    /// Returns true if this handle refers to the device `ram`.
    pub fn is(&self, ram: &Ram) -> bool {
        // Comparing addresses is enough: while the weak handle exists, no other device can have
        // this address.
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&ram.0))
    }

    pub fn get(&self) -> Option<Ram> {
        self.0.upgrade().map(Ram)
    }
}

impl Ram {
    pub(crate) fn downgrade(&self) -> WeakRam {
        WeakRam(Arc::downgrade(&self.0))
    }

    /// Returns the uncompressed bytes of the pages changed since a [`Keep`](crate::keep::Keep) last
    /// saved the device; after a rewind, of all pages. `None` if the device was never saved. Does
    /// not scan the pages.
    pub fn unsaved_bytes(&self) -> Option<u64> {
        let dirty = self.0.chain.get().dirty()?;
        let changed = if dirty.is_everything() { self.0.layer().get(stored::PAGES) } else { dirty.pages() };
        Some(changed * PAGE)
    }

    /// Sets the record of changed pages; `None` ends the recording. Returns the previous record.
    pub(crate) fn track_changes(&self, dirty: Option<Arc<Dirty>>) -> Option<Arc<Dirty>> {
        self.0.chain.get().replace_dirty(dirty)
    }

    pub(crate) fn dirty(&self) -> Option<Arc<Dirty>> {
        self.0.chain.get().dirty()
    }

    /// Returns the stored bytes of the device's own objects in memory, and the number of its own
    /// pages, including written-back pages.
    pub(crate) fn stored_bytes(&self) -> (u64, u64) {
        let layer = self.0.layer();
        (layer.get(stored::COMPRESSED_BYTES), layer.get(stored::PAGES))
    }
}

impl Family {
    /// Returns the bytes of the family's objects on the backing device, without headers.
    pub(crate) fn spilled_bytes(&self) -> u64 {
        self.0.pages.store.as_ref().map_or(0, |store| store.stat().live_bytes)
    }
}
