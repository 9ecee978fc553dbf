//! Compaction of a family's pool, and of packed objects on its backing device.

use crate::ram::device::Ram;

impl Ram {
    /// Compacts the pool while requests continue. Returns the number of pool pages returned to the
    /// system; 0 if another compaction runs. Packed objects on a backing device are compacted too,
    /// which [`backing`](Self::backing) shows as fewer used bytes.
    pub fn compact(&self) -> u64 {
        self.compact_with_progress(&mut |_, _| true)
    }

    /// Compacts like [`compact`](Self::compact) and reports progress. `watch` receives the bytes
    /// processed and the total bytes, each of pool and backing device together. Compaction ends
    /// early when `watch` returns false; objects already moved stay moved.
    pub fn compact_with_progress(&self, watch: &mut dyn FnMut(u64, u64) -> bool) -> u64 {
        let reclaim = &self.0.family.evict.reclaim;
        let (holes, mut pool) = (reclaim.bytes(), 0);
        let mut go_on = true;
        let pages = self.0.pages.compact_with_progress(&mut |done, all| {
            pool = all;
            go_on = watch(done, all + holes);
            go_on
        });
        if go_on {
            reclaim.reclaim_all(&mut |done| watch(pool + done.min(holes), pool + holes));
        }
        self.0.pages.wake_space_waiters();
        pages
    }
}
