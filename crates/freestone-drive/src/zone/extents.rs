//! Extents: those of the device below, but data (not zeroes) beyond a write pointer.

use super::{Inner, ZoneCondition};
use freestone_core::device::{Extent, ExtentKind, Result, range_end};

/// Maximum number of extents collected before they are returned, and of zones described per call.
const ROWS_MAX: usize = 64;
const ZONES_MAX: u32 = 1024;

impl Inner {
    /// Describes a range, like `Device::extents`.
    pub fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let layout = &self.table.layout;
        let end = range_end(offset, len, layout.size)?;
        if !self.stores {
            return self.backing.extents(offset, len, row);
        }
        let first = layout.zone_of(offset);
        let mut at = offset;
        for zone in (first..layout.zones).take(ZONES_MAX as usize) {
            let to = end.min(layout.start(zone) + layout.len(zone));
            let (described, more) = self.zone_extents(zone, at, to - at, row)?;
            at += described;
            // A zone that was not described completely ends the call.
            if !more || at < to || at == end {
                break;
            }
        }
        Ok(at - offset)
    }

    /// Describes a part of one zone. Returns the described length, and true if the caller wants
    /// more.
    fn zone_extents(
        &self,
        zone: u32,
        offset: u64,
        len: u64,
        row: &mut dyn FnMut(Extent) -> bool,
    ) -> Result<(u64, bool)> {
        let layout = &self.table.layout;
        let mut rows = Vec::new();
        let real = loop {
            let word = self.table.look(zone);
            let real = match word.condition() {
                ZoneCondition::NotWritePointer | ZoneCondition::ReadOnly => len,
                ZoneCondition::Offline => 0,
                _ => (layout.start(zone) + word.pointer()).saturating_sub(offset).min(len),
            };
            rows.clear();
            if real > 0 {
                self.backing.extents(offset, real, &mut |extent| {
                    rows.push(extent);
                    rows.len() < ROWS_MAX
                })?;
            }
            if self.table.is_same_generation(zone, word) {
                break real;
            }
        };
        let mut at = 0;
        for extent in rows {
            at += extent.len;
            if !row(extent) {
                return Ok((at, false));
            }
        }
        if at < real || at == len {
            return Ok((at, true));
        }
        Ok((len, row(Extent { offset: offset + at, len: len - at, kind: ExtentKind::Data })))
    }
}
