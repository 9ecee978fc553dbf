//! Converts zones to ublk's format, and runs zone operations.

use freestone_core::device::zoned::ZoneRequest;
use freestone_core::device::{Device, Geometry, Result, Zone, ZoneGeometry};
use thiserror::Error;
use zerocopy::IntoBytes;

use crate::kernel::abi::{ParamZoned, SECTOR_BYTES, ZoneRow, feature};

/// Features required for zones. Without user copy an append cannot return the sector to which it
/// wrote.
pub const FEATURES: u64 = feature::ZONED | feature::USER_COPY;
pub const ROW_BYTES: usize = size_of::<ZoneRow>();

/// Reasons why the kernel does not support the zones of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum UnsupportedZones {
    /// The zone size is not a power of two, or out of range.
    #[error("zones of {0} bytes: the kernel takes powers of two, from a page up to 2 TiB")]
    Size(u64),
    /// The last zone is shorter than the others.
    #[error("the last zone is shorter than the others: ublk shows whole zones only")]
    ShortLast,
    /// The device does not support appends.
    #[error("ublk has no zones without appends: zone_append_max_sectors must not be 0")]
    NoAppend,
}

/// Checks that the kernel supports a device's zones.
pub fn check(geometry: &Geometry) -> std::result::Result<(), UnsupportedZones> {
    let Some(zones) = geometry.zones else { return Ok(()) };
    let sizes = rustix::param::page_size() as u64..=u64::from(u32::MAX) * SECTOR_BYTES;
    if !zones.zone_size.is_power_of_two() || !sizes.contains(&zones.zone_size) {
        return Err(UnsupportedZones::Size(zones.zone_size));
    }
    if !geometry.size.is_multiple_of(zones.zone_size) {
        return Err(UnsupportedZones::ShortLast);
    }
    if zones.max_append == 0 { Err(UnsupportedZones::NoAppend) } else { Ok(()) }
}

/// Returns the zone parameters for a device with requests of at most `max_request` bytes.
pub fn params(zones: &ZoneGeometry, max_request: u32) -> ParamZoned {
    let max_append = u64::from(zones.max_append.min(max_request)).min(zones.zone_size);
    ParamZoned {
        max_open_zones: zones.max_open,
        max_active_zones: zones.max_active,
        max_zone_append_sectors: (max_append / SECTOR_BYTES) as u32,
        ..ParamZoned::default()
    }
}

/// Runs a zone request. A report writes zones to `rows`, and sets the rows after the last zone to
/// zeroes.
pub fn execute(device: &dyn Device, request: ZoneRequest, rows: &mut [u8]) -> Result<()> {
    let zones = device.zones()?;
    match request {
        ZoneRequest::Op(op, offset) => zones.zone_op(op, offset),
        ZoneRequest::ResetAll => zones.reset_all(),
        ZoneRequest::Report(offset) => {
            rows.fill(0);
            let mut left = rows.chunks_exact_mut(ROW_BYTES).peekable();
            zones.report(offset, &mut |zone| {
                if let Some(place) = left.next() {
                    place.copy_from_slice(row(&zone).as_bytes());
                }
                left.peek().is_some()
            })
        }
    }
}

fn row(zone: &Zone) -> ZoneRow {
    ZoneRow {
        start: zone.start / SECTOR_BYTES,
        len: zone.len / SECTOR_BYTES,
        write_pointer: zone.write_pointer / SECTOR_BYTES,
        kind: zone.kind.number(),
        condition: zone.condition.number(),
        capacity: zone.capacity / SECTOR_BYTES,
        ..ZoneRow::default()
    }
}
