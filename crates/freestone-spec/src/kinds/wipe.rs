//! Resets devices to their initial content.

use std::sync::atomic::Ordering;

use freestone::device;

use super::Entry;

impl Entry {
    /// Resets the content of the device to the initial one: see
    /// [`KindInstance::wipe`](super::KindInstance::wipe).
    pub fn wipe(&self, counters: bool) -> device::Result<()> {
        self.rewinds.fetch_add(1, Ordering::SeqCst);
        if let Some(origin) = &self.cow_origin {
            origin.mark_changed();
        }
        // The changes are counted before the wipe, because a write during the wipe may survive it.
        let changes = self.client_changes();
        self.layers.wipe(&|| self.kind.wipe(counters))?;
        self.changes_at_wipe.store(changes, Ordering::SeqCst);
        Ok(())
    }

    /// Returns true if [`wipe`](Self::wipe) would not change the content. In this case `counters`
    /// resets the counters. Returns false for a device with unflushed writes or zones, which are
    /// part of the content.
    pub fn skip_wipe(&self, counters: bool) -> bool {
        self.layers.power.is_none() && self.layers.zones.is_none() && self.kind.skip_wipe(counters)
    }

    /// Returns the number of writes, discards and zeroings by clients since the device was created
    /// or reset.
    pub fn changes_since_wipe(&self) -> u64 {
        self.client_changes().saturating_sub(self.changes_at_wipe.load(Ordering::SeqCst))
    }

    fn client_changes(&self) -> u64 {
        self.request_counts().map_or(0, |io| io.writes + io.appends + io.discards + io.zeroes)
    }
}
