//! Return of a device to its initial content, and reset of its statistics.

use std::sync::Arc;

use super::Ram;
use super::chain::{Chain, resume_held_requests};
use super::parent::Parent;
use super::retire;
use super::stats::counter;
use crate::ram::memory::config::SetupError;
use crate::ram::memory::layer::stored;
use crate::ram::memory::record::{self, LayerRecord};
use freestone_core::kill_points::{self, KillPoint};
use freestone_core::sync::Ordering;

impl Ram {
    /// Wipes content and statistics. Requests in flight finish on the old content. Afterwards a
    /// fork reads as its base again.
    ///
    /// # Errors
    /// Fails on a snapshot.
    pub fn reset(&self) -> Result<(), SetupError> {
        self.rewind()?;
        while self.0.pages.free_leaf_or_yield() {}
        self.clear_counters();
        Ok(())
    }

    /// Resets all statistics to those of a new device, and keeps the content.
    pub fn clear_counters(&self) {
        let inner = &*self.0;
        // Clear the counters of the backing device only if no other device of the family uses it.
        if inner.pages.layers.is_only_active(inner.layer().id())
            && let Some(store) = &inner.pages.store
        {
            store.clear_counts();
        }
        inner.family.auto.clear();
        inner.family.dedup.clear();
        inner.family.groups.clear();
        inner.pages.wake_memory_waiters();
        inner.pages.pool.release_empties();
        inner.pages.pool.reset_pages_max();
        // Relaxed: a statistic.
        inner.pages.compacted.store(0, Ordering::Relaxed);
        (0..counter::COUNT).for_each(|counter| inner.counters.clear(counter));
    }

    /// Sets the statistic `mem_used_max` to the memory that the pool uses now.
    pub fn reset_mem_used_max(&self) {
        self.0.pages.pool.reset_pages_max();
    }

    /// Returns the device to its initial content: a fork to its base, a disk to zeroes. The call
    /// takes constant time; the old content is freed in the background. Requests in flight finish
    /// on the old content. Snapshots keep their content.
    ///
    /// # Errors
    /// Fails on a snapshot.
    pub fn rewind(&self) -> Result<(), SetupError> {
        let inner = &*self.0;
        if inner.is_snapshot {
            return Err(SetupError::Snapshot);
        }
        let _one = inner.changing.lock();
        let layer = inner.pages.layers.make(&inner.pages.common, Arc::clone(&inner.limits))?;
        if let Some(former) = record::read(inner.layer().table()) {
            let rewinds = former.rewinds + 1;
            let of = LayerRecord { id: layer.id(), chain: layer.id(), rewinds, ..former };
            record::write(layer.table(), &of);
        }
        kill_points::pass(KillPoint::RewindRecorded);
        let new = Chain::new(layer, inner.parent.loaded().clone());
        if let Parent::Staged(staged) = &inner.parent {
            // Detach the device from its file of pages not loaded yet, before the first write to
            // the new layer. The new content does not include that file.
            staged.detach();
        }
        // A request may write to the new content before the old content is freed. During a removal,
        // such a write waits for memory instead of failing.
        inner.pages.begin_removal();
        let (unused, held) = inner.chain.rewind(&inner.pages, &new, &self.0);
        kill_points::pass(KillPoint::Rewound);
        if let Some(layer) = unused {
            retire::retire_layer(&inner.pages, layer);
        }
        inner.pages.end_removal();
        inner.update_plain();
        resume_held_requests(held);
        Ok(())
    }

    /// Returns true if a [`rewind`](Self::rewind) would not change the content: the device has no
    /// page of its own and no page left to load. Discarded pages over data of its base count as its
    /// own.
    pub fn is_unmodified(&self) -> bool {
        let inner = &*self.0;
        let is_empty = || inner.layer().get(stored::PAGES) == 0 && inner.parent.staged_source().is_none();
        if inner.is_snapshot || !is_empty() {
            return false;
        }
        // The page count of the layer is exact only while writers are frozen.
        let _one = inner.changing.lock();
        let chain = inner.chain.freeze();
        let is_empty = is_empty();
        resume_held_requests(chain.thaw());
        is_empty
    }
}
