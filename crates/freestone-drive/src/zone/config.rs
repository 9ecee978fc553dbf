//! Configuration of a zoned device and its validation.

use std::io;

use thiserror::Error;

use super::durable::file::StateError;
use super::table::layout::Layout;
pub use super::table::layout::ZONE_SIZE_MAX_BYTES;
use freestone_core::device::Geometry;

/// Maximum number of zones of a device. Limits the memory of the zone table: 128 bytes per zone up
/// to 65 536 zones, 8 bytes per zone with more.
pub const ZONES_MAX: u64 = 1 << 24;

/// Configuration of the zones of a device, with the parameter names of `null_blk`. Sizes are in
/// bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Size of a zone: a power of two from the logical block to the size of the device, at most
    /// [`ZONE_SIZE_MAX_BYTES`]. The last zone may be shorter if `zone_capacity` equals `zone_size`.
    pub zone_size: u64,
    /// Number of writable bytes per zone: a multiple of the logical block, at most `zone_size`. 0
    /// for `zone_size`.
    pub zone_capacity: u64,
    /// Number of conventional zones at the start of the device. Reduced if necessary, so that at
    /// least one zone is sequential.
    pub zone_nr_conv: u32,
    /// Maximum number of open sequential zones. 0, or at least the number of sequential zones,
    /// means unlimited. Reduced to `zone_max_active` if that is a limit.
    pub zone_max_open: u32,
    /// Maximum number of active (open or closed) sequential zones. 0, or at least the number of
    /// sequential zones, means unlimited.
    pub zone_max_active: u32,
    /// Maximum size of a zone append, rounded down to blocks and limited to the capacity of a zone.
    /// 0 disables zone append.
    pub zone_append_max: u64,
    /// True if sequential zones are full when the device is created, else they are empty.
    pub zone_full: bool,
    /// True if the device under this layer stores data. Data beyond a write pointer then reads as
    /// bytes of 0xFF. If false, as with the plain null device, reads return whatever the device
    /// under this layer returns.
    pub stores: bool,
}

impl Default for Config {
    /// Returns the defaults of `null_blk`: zones of 256 MiB, all sequential, without limits.
    fn default() -> Self {
        Self {
            zone_size: 256 << 20,
            zone_capacity: 0,
            zone_nr_conv: 0,
            zone_max_open: 0,
            zone_max_active: 0,
            zone_append_max: u64::MAX,
            zone_full: false,
            stores: true,
        }
    }
}

/// Errors from creating a zoned device.
#[derive(Debug, Error)]
pub enum SetupError {
    /// The zone size is not a power of two, or too small or large.
    #[error(
        "zone_size is {zone_size} bytes; it must be a power of two from {block} bytes to the size of the device ({size} bytes), \
         and at most {ZONE_SIZE_MAX_BYTES}"
    )]
    ZoneSize {
        /// Requested zone size in bytes.
        zone_size: u64,
        /// Logical block of the device in bytes.
        block: u32,
        /// Size of the device in bytes.
        size: u64,
    },
    /// The device would have more than [`ZONES_MAX`] zones.
    #[error("zone_size {zone_size} gives {zones} zones; at most {ZONES_MAX} are possible")]
    TooManyZones {
        /// Requested zone size in bytes.
        zone_size: u64,
        /// Number of zones that would result.
        zones: u64,
    },
    /// The zone capacity exceeds the zone size, or is not a multiple of the logical block.
    #[error(
        "zone_capacity is {capacity} bytes; it must be a multiple of {block} bytes and at most zone_size ({zone_size} bytes)"
    )]
    Capacity {
        /// Requested zone capacity in bytes.
        capacity: u64,
        /// Logical block of the device in bytes.
        block: u32,
        /// Zone size in bytes.
        zone_size: u64,
    },
    /// The last zone is shorter than the others, but `zone_capacity` is smaller than `zone_size`.
    #[error(
        "the device has {size} bytes, which leaves a last zone of {last} bytes; a shorter last zone is possible only where \
         zone_capacity is zone_size ({zone_size} bytes)"
    )]
    ShortLastZone {
        /// Size of the device in bytes.
        size: u64,
        /// Length of the last zone in bytes.
        last: u64,
        /// Zone size in bytes.
        zone_size: u64,
    },
    /// The device under the zone layer already has zones.
    #[error("the device has zones already")]
    Zoned,
    /// The system has no memory for the table of this many zones.
    #[error("there is no memory for {0} zones")]
    NoMemory(u32),
    /// Opening or writing the zone state file failed.
    #[error("the zone state file: {0}")]
    State(#[from] StateError),
    /// A thread for queued writes or syncs could not be started.
    #[error("a thread could not be started: {0}")]
    Thread(#[source] io::Error),
}

impl Layout {
    /// Validates a configuration for a device with the geometry `below`, and returns the layout of
    /// its zones.
    pub fn new(config: &Config, below: &Geometry) -> Result<Self, SetupError> {
        if below.zones.is_some() {
            return Err(SetupError::Zoned);
        }
        let block = below.logical_block;
        // The padding of the last block is not stored, so the zones do not use a padded last block.
        let size = below.size - if below.padding > 0 { u64::from(block) } else { 0 };
        let (zone_size, whole) = (config.zone_size, u64::from(block));
        if !zone_size.is_power_of_two() || zone_size < whole || zone_size > size.min(ZONE_SIZE_MAX_BYTES) {
            return Err(SetupError::ZoneSize { zone_size, block, size });
        }
        let zones = size.div_ceil(zone_size);
        if zones > ZONES_MAX {
            return Err(SetupError::TooManyZones { zone_size, zones });
        }
        let capacity = if config.zone_capacity == 0 { zone_size } else { config.zone_capacity };
        if capacity > zone_size || !capacity.is_multiple_of(whole) {
            return Err(SetupError::Capacity { capacity, block, zone_size });
        }
        let last = size % zone_size;
        if last != 0 && capacity != zone_size {
            return Err(SetupError::ShortLastZone { size, last, zone_size });
        }
        let zones = zones as u32;
        let conventional = config.zone_nr_conv.min(zones - 1);
        let sequential = zones - conventional;
        let limit = |limit: u32| if limit >= sequential { 0 } else { limit };
        let max_active = limit(config.zone_max_active);
        let max_open = match max_active {
            0 => limit(config.zone_max_open),
            // As in the kernel: 0 stays "no limit", and a limit above `max_active` is reduced to
            // it.
            _ => config.zone_max_open.min(max_active),
        };
        let max_append = config.zone_append_max.min(capacity).min(u64::from(u32::MAX)) & !(whole - 1);
        Ok(Self {
            size,
            block,
            zone_shift: zone_size.trailing_zeros(),
            capacity,
            zones,
            conventional,
            max_open,
            max_active,
            max_append: max_append as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::null;

    fn below(size: u64) -> Geometry {
        use freestone_core::device::Device;
        null::Null::new(null_config(size)).unwrap().geometry()
    }

    fn null_config(size: u64) -> null::Config {
        null::Config::plain(size, 4096)
    }

    #[test]
    fn invalid_configurations_are_rejected() {
        let layout = |size: u64, config: Config| Layout::new(&config, &below(size)).map(|_| ());
        let zones = |zone_size| Config { zone_size, ..Config::default() };
        for zone_size in [0, 1, 2048, 4097, 12288, 2 << 20, u64::MAX, 1 << 63] {
            assert!(matches!(layout(1 << 20, zones(zone_size)), Err(SetupError::ZoneSize { .. })));
        }
        assert!(layout(1 << 20, zones(1 << 20)).is_ok());
        assert!(layout(1 << 20, zones(4096)).is_ok());
        assert!(matches!(layout(1 << 40, zones(4096)), Err(SetupError::TooManyZones { .. })));
        assert!(matches!(layout(1 << 62, zones(1 << 50)), Err(SetupError::ZoneSize { .. })));
        for zone_capacity in [4097, 100, (1 << 16) + 4096] {
            let config = Config { zone_capacity, ..zones(1 << 16) };
            assert!(matches!(layout(1 << 20, config), Err(SetupError::Capacity { .. })));
        }
        let short = (1 << 20) + 4096;
        assert!(layout(short, zones(1 << 16)).is_ok());
        assert!(layout(short, Config { zone_capacity: 1 << 16, ..zones(1 << 16) }).is_ok());
        let config = Config { zone_capacity: 1 << 15, ..zones(1 << 16) };
        assert!(matches!(layout(short, config), Err(SetupError::ShortLastZone { last: 4096, .. })));
    }

    #[test]
    fn limits_are_reduced_as_in_kernel() {
        // Requested and resulting (conventional zones, open limit, active limit) of a device with
        // 16 zones.
        let rows = [
            ((0, 0, 0), (0, 0, 0)),
            ((0, 16, 0), (0, 0, 0)),
            ((0, 15, 0), (0, 15, 0)),
            ((0, 15, 16), (0, 15, 0)),
            ((0, 100, 4), (0, 4, 4)),
            ((0, 0, 4), (0, 0, 4)),
            ((0, 3, 4), (0, 3, 4)),
            ((4, 12, 12), (4, 0, 0)),
            ((4, 12, 11), (4, 11, 11)),
            ((99, 1, 1), (15, 0, 0)),
        ];
        for ((zone_nr_conv, zone_max_open, zone_max_active), expected) in rows {
            let config = Config {
                zone_size: 1 << 16,
                zone_nr_conv,
                zone_max_open,
                zone_max_active,
                ..Config::default()
            };
            let layout = Layout::new(&config, &below(1 << 20)).unwrap();
            assert_eq!((layout.conventional, layout.max_open, layout.max_active), expected, "{config:?}");
        }
    }

    #[test]
    fn appends_are_rounded_and_bounded() {
        let zone_capacity = 3 << 14;
        for (asked, given) in [(0, 0), (4095, 0), (4096, 4096), (10000, 8192), (u64::MAX, 3 << 14)] {
            let config =
                Config { zone_size: 1 << 16, zone_capacity, zone_append_max: asked, ..Config::default() };
            let layout = Layout::new(&config, &below(1 << 20)).unwrap();
            assert_eq!(u64::from(layout.max_append), given);
        }
    }
}
