//! Reset of a device to its initial content.

use std::sync::atomic::Ordering;

use freestone::device;

use super::Entry;

impl Entry {
    /// Resets the content: see [`KindInstance::wipe`](super::KindInstance::wipe).
    pub fn wipe(&self, counters: bool) -> device::Result<()> {
        self.rewinds.fetch_add(1, Ordering::SeqCst);
        if let Some(origin) = &self.cow_origin {
            origin.was_changed();
        }
        // Count before the wipe, because a write during the wipe may survive it.
        let changes = self.changes();
        self.layers.wipe(&|| self.kind.wipe(counters))?;
        self.changes_wiped.store(changes, Ordering::SeqCst);
        Ok(())
    }

    /// Returns true if [`wipe`](Self::wipe) would not change the content. On request, resets the
    /// counters then. Unflushed writes and zones are content, so a device that has them is always wiped.
    pub fn skip_wipe(&self, counters: bool) -> bool {
        self.layers.power.is_none() && self.layers.zones.is_none() && self.kind.skip_wipe(counters)
    }

    /// Returns the number of changing requests by clients since the device was created or reset.
    pub fn changes_since_wipe(&self) -> u64 {
        self.changes().saturating_sub(self.changes_wiped.load(Ordering::SeqCst))
    }

    fn changes(&self) -> u64 {
        self.io().map_or(0, |io| io.writes + io.appends + io.discards + io.zeroes)
    }
}
