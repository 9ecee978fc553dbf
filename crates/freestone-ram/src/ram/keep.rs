//! What keeping a device needs to know of it: which pages changed since it was last saved.

use std::sync::{Arc, Weak};

use super::layer::stored;
use super::{Family, Inner, PAGE, Ram};
use freestone_core::slot::chain::Dirty;

/// A device, known again without holding on to it.
pub(crate) struct WeakRam(Weak<Inner>);

impl WeakRam {
    /// Whether it is this one.
    pub fn is(&self, ram: &Ram) -> bool {
        // While this is there no other device takes its place in memory.
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&ram.0))
    }

    /// The device, if it is still there.
    pub fn get(&self) -> Option<Ram> {
        self.0.upgrade().map(Ram)
    }
}

impl Ram {
    pub(crate) fn downgrade(&self) -> WeakRam {
        WeakRam(Arc::downgrade(&self.0))
    }

    /// Bytes of pages that changed since the device was last saved by a [`Keep`](crate::keep::Keep),
    /// uncompressed; of one that was rewound since, all it holds. `None`: it was not saved by one.
    /// Costs a look.
    pub fn unsaved_bytes(&self) -> Option<u64> {
        let dirty = self.0.chain.get().dirty()?;
        let changed = if dirty.is_everything() { self.0.layer().get(stored::PAGES) } else { dirty.pages() };
        Some(changed * PAGE)
    }

    /// From now on it is noted here what changes, or nowhere. Returns where it was until now.
    pub(crate) fn note_changes(&self, dirty: Option<Arc<Dirty>>) -> Option<Arc<Dirty>> {
        self.0.chain.get().note_changes(dirty)
    }

    /// Where it is noted what changes.
    pub(crate) fn dirty(&self) -> Option<Arc<Dirty>> {
        self.0.chain.get().dirty()
    }

    /// Bytes of what it holds itself in memory as they are stored; and pages, spilled ones among
    /// them.
    pub(crate) fn stored_bytes(&self) -> (u64, u64) {
        let layer = self.0.layer();
        (layer.get(stored::COMPRESSED_BYTES), layer.get(stored::PAGES))
    }
}

impl Family {
    /// Bytes of what is spilled as they are stored.
    pub(crate) fn spilled_bytes(&self) -> u64 {
        self.0.pages.store.as_ref().map_or(0, |store| store.numbers().live_bytes)
    }
}
