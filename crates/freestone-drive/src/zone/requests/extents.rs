//! Extents of a zoned device: those of the device under this layer, except that ranges beyond a
//! write pointer are reported as data.

use crate::zone::{Inner, ZoneCondition};
use freestone_core::device::{Extent, ExtentKind, Result, range_end};

/// Maximum number of extents collected per zone and call.
const ROWS_MAX: usize = 64;
/// Maximum number of zones described per call of `extents`.
const ZONES_MAX: u32 = 1024;

impl Inner {
    /// Reports the extents of a range, like `Device::extents`. Returns the number of bytes
    /// described.
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
            // If a zone was not described completely, the call ends there.
            if !more || at < to || at == end {
                break;
            }
        }
        Ok(at - offset)
    }

    /// Reports the extents of a range in one zone. Returns the number of bytes described, and true
    /// if `row` accepts more extents.
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
            let word = self.table.load(zone);
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
