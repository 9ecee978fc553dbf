//! What lies where: as the device below says, but what is behind a write pointer reads as bytes
//! that are no zeroes.

use super::{Inner, ZoneCondition};
use freestone_core::device::{Extent, ExtentKind, Result, range_end};

/// Rows that are taken from the device below before they are handed on, and zones that are
/// described in one call.
const ROWS_MAX: usize = 64;
const ZONES_MAX: u32 = 1024;

impl Inner {
    /// Describes a range, as `Device::extents` does.
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
            // A zone that was not described to its end is a place to stop as good as any.
            if !more || at < to || at == end {
                break;
            }
        }
        Ok(at - offset)
    }

    /// Describes a part of one zone. How far that came, and whether the caller wants more.
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
            if self.table.is_still(zone, word) {
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
