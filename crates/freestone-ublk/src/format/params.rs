//! Converts a device's geometry into ublk parameters.

use freestone_core::bytes::Bytes;
use freestone_core::device::{Disk, Geometry};

use crate::format::zones;
use crate::kernel::abi::{ParamBasic, ParamDiscard, Params, SECTOR_BYTES, attr, param};

/// The block layer's limit for discard and write zeroes in sectors, so that a range is less than 4 GiB.
const MAX_RANGE_SECTORS: u32 = u32::MAX >> 9;

/// Returns the current size of the device in sectors, without a partial sector at the end.
pub fn sectors(disk: &Disk) -> u64 {
    Bytes::user_geometry(disk.device.geometry()).size / SECTOR_BYTES
}

/// Returns true if the device has zones. Zoned devices use user copy.
pub fn is_zoned(disk: &Disk) -> bool {
    disk.device.geometry().zones.is_some()
}

/// Returns the ublk parameters for a disk whose request buffers have `max_bytes`.
pub fn for_disk(disk: &Disk, max_bytes: u32) -> Params {
    params(&disk.device.geometry(), disk.read_only, max_bytes)
}

fn params(geometry: &Geometry, read_only: bool, max_bytes: u32) -> Params {
    let page = rustix::param::page_size() as u32;
    // The logical block is a sector even if the device's blocks are larger, because the device serves smaller
    // requests too. Partition tables in 512-byte sectors then match, as over the other exports. Zones must be
    // written in the device's own blocks.
    let logical = if geometry.zones.is_some() { geometry.logical_block } else { SECTOR_BYTES as u32 };
    let physical = geometry.physical_block.clamp(logical, page);
    let shift = |bytes: u32| bytes.max(1).ilog2() as u8;
    let mut attrs = 0;
    if read_only {
        attrs |= attr::READ_ONLY;
    }
    if geometry.rotational {
        attrs |= attr::ROTATIONAL;
    }
    if geometry.volatile_cache {
        // Without a volatile cache the block layer sends neither flushes nor FUA.
        attrs |= attr::VOLATILE_CACHE | attr::FUA;
    }
    let wanted = if geometry.max_request == 0 { max_bytes } else { geometry.max_request };
    // The block layer rejects limits below a page. A device with a smaller limit splits requests itself.
    let max_request = wanted.min(max_bytes).max(page);
    let visible = Bytes::user_geometry(*geometry);
    let basic = ParamBasic {
        attrs,
        logical_bs_shift: shift(logical),
        physical_bs_shift: shift(physical),
        io_opt_shift: shift(geometry.io_opt.max(physical)),
        io_min_shift: shift(geometry.io_min.max(physical)),
        max_sectors: max_request / SECTOR_BYTES as u32,
        chunk_sectors: geometry.zones.map_or(0, |zones| (zones.zone_size / SECTOR_BYTES) as u32),
        dev_sectors: visible.size / SECTOR_BYTES,
        virt_boundary_mask: 0,
    };
    let len = size_of::<Params>() as u32;
    if let Some(zones) = &geometry.zones {
        // Zoned devices have no write zeroes: the block layer would not split write zeroes at zone
        // boundaries. Instead it issues writes of zeroes, which it does split.
        let zoned = zones::params(zones, max_request);
        return Params { len, types: param::BASIC | param::ZONED, basic, zoned, ..Params::default() };
    }
    if read_only {
        return Params { len, types: param::BASIC, basic, ..Params::default() };
    }
    let frees = geometry.discard_granularity > 0;
    // The granularity must not be zero, even if the device does not support discard.
    let granularity = geometry.discard_granularity.max(physical);
    let whole_units = MAX_RANGE_SECTORS - MAX_RANGE_SECTORS % (granularity / SECTOR_BYTES as u32).max(1);
    let discard = ParamDiscard {
        discard_granularity: granularity,
        max_discard_sectors: if frees { whole_units } else { 0 },
        max_write_zeroes_sectors: whole_units,
        max_discard_segments: 1,
        ..ParamDiscard::default()
    };
    Params { len, types: param::BASIC | param::DISCARD, basic, discard, ..Params::default() }
}

#[cfg(test)]
mod tests {
    use freestone_core::device::ZoneGeometry;

    use super::*;
    use crate::format::zones::UnsupportedZones;
    use crate::kernel::abi::ParamZoned;

    const MAX: u32 = 512 << 10;

    fn geometry() -> Geometry {
        Geometry {
            size: 64 << 20,
            padding: 0,
            logical_block: 4096,
            physical_block: 4096,
            io_min: 4096,
            io_opt: 128 << 10,
            max_request: 0,
            discard_granularity: 4096,
            fast_zeroes: true,
            volatile_cache: false,
            volatile_media: true,
            rotational: false,
            read_only: false,
            ignores_data: false,
            zones: None,
        }
    }

    #[test]
    fn params_follow_geometry() {
        let result = params(&geometry(), false, MAX);
        assert_eq!((result.len, result.types), (112, param::BASIC | param::DISCARD));
        let basic = result.basic;
        assert_eq!((basic.attrs, basic.dev_sectors, basic.max_sectors), (0, 64 << 11, 1024));
        let shifts =
            (basic.logical_bs_shift, basic.physical_bs_shift, basic.io_min_shift, basic.io_opt_shift);
        assert_eq!(shifts, (9, 12, 12, 17));
        assert_eq!((result.discard.discard_granularity, result.discard.max_discard_segments), (4096, 1));
        assert_eq!(result.discard.max_discard_sectors % 8, 0);
        assert!(result.discard.max_discard_sectors > 0 && result.discard.max_write_zeroes_sectors > 0);
    }

    #[test]
    fn cache_and_media_become_attributes() {
        let attrs = |geometry: Geometry, read_only| params(&geometry, read_only, MAX).basic.attrs;
        let cached = Geometry { volatile_cache: true, ..geometry() };
        assert_eq!(attrs(cached, false), attr::VOLATILE_CACHE | attr::FUA);
        assert_eq!(attrs(Geometry { rotational: true, ..geometry() }, false), attr::ROTATIONAL);
        assert_eq!(attrs(geometry(), true), attr::READ_ONLY);
        assert_eq!(params(&geometry(), true, MAX).types, param::BASIC);
    }

    #[test]
    fn limits_are_clamped_to_driver_range() {
        let odd = Geometry {
            padding: 3584 + 100,
            physical_block: 1 << 20,
            io_min: 0,
            io_opt: 0,
            max_request: 512,
            discard_granularity: 0,
            ..geometry()
        };
        let result = params(&odd, false, MAX);
        let page = rustix::param::page_size() as u32;
        assert_eq!(result.basic.max_sectors, page / 512);
        assert_eq!(result.basic.dev_sectors, (64 << 11) - 8);
        assert_eq!(1 << result.basic.physical_bs_shift, page);
        assert!(result.basic.io_opt_shift >= 9 && result.basic.io_min_shift >= 9);
        assert_eq!((result.discard.max_discard_sectors, result.discard.discard_granularity), (0, page));
        assert!(result.discard.max_write_zeroes_sectors > 0);
        let wide = Geometry { max_request: u32::MAX - 4095, ..geometry() };
        assert_eq!(params(&wide, false, MAX).basic.max_sectors, MAX / 512);
    }

    #[test]
    fn zone_params_use_sectors_and_device_blocks() {
        let zones =
            ZoneGeometry { zone_size: 4 << 20, nr_zones: 16, max_open: 3, max_active: 5, max_append: 16384 };
        let with = |zones, block| Geometry { zones: Some(zones), logical_block: block, ..geometry() };
        let result = params(&with(zones, 4096), false, MAX);
        assert_eq!(result.types, param::BASIC | param::ZONED);
        assert_eq!((result.basic.chunk_sectors, result.basic.logical_bs_shift), (8192, 12));
        let ParamZoned { max_open_zones, max_active_zones, max_zone_append_sectors, .. } = result.zoned;
        assert_eq!((max_open_zones, max_active_zones, max_zone_append_sectors), (3, 5, 32));
        assert_eq!(result.discard, ParamDiscard::default());
        let wide = ZoneGeometry { max_append: !511, ..zones };
        let result = params(&with(wide, 512), true, MAX);
        assert_eq!((result.zoned.max_zone_append_sectors, result.basic.logical_bs_shift), (MAX / 512, 9));
        assert_eq!(result.basic.attrs, attr::READ_ONLY);
        assert_eq!(crate::format::zones::check(&with(zones, 4096)), Ok(()));
        let unfit = |zones: ZoneGeometry| crate::format::zones::check(&with(zones, 4096));
        assert_eq!(unfit(ZoneGeometry { zone_size: 3 << 20, ..zones }), Err(UnsupportedZones::Size(3 << 20)));
        assert_eq!(unfit(ZoneGeometry { zone_size: 1 << 42, ..zones }), Err(UnsupportedZones::Size(1 << 42)));
        assert_eq!(unfit(ZoneGeometry { zone_size: 128 << 20, ..zones }), Err(UnsupportedZones::ShortLast));
        assert_eq!(unfit(ZoneGeometry { max_append: 0, ..zones }), Err(UnsupportedZones::NoAppend));
    }
}
