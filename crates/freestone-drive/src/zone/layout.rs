//! Where the zones of a device are.

use freestone_core::device::ZoneGeometry;

/// The largest zone in bytes: what a zone's word has room for.
pub const ZONE_SIZE_MAX_BYTES: u64 = 1 << 49;

/// All that does not change.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Bytes of the device.
    pub size: u64,
    /// Bytes of the logical block.
    pub block: u32,
    /// Two to this power is the size of a zone.
    pub zone_shift: u32,
    /// Bytes that can be written of a zone; of a shorter last one less.
    pub capacity: u64,
    /// Zones.
    pub zones: u32,
    /// The first zones, which are conventional.
    pub conventional: u32,
    /// 0 is no limit.
    pub max_open: u32,
    /// 0 is no limit.
    pub max_active: u32,
    /// Bytes; 0: not offered.
    pub max_append: u32,
}

impl Layout {
    /// What exports are told.
    pub fn geometry(&self) -> ZoneGeometry {
        ZoneGeometry {
            zone_size: self.zone_size(),
            nr_zones: self.zones,
            max_open: self.max_open,
            max_active: self.max_active,
            max_append: self.max_append,
        }
    }

    /// Bytes between two zone starts.
    #[inline]
    pub const fn zone_size(&self) -> u64 {
        1 << self.zone_shift
    }

    /// The zone of a byte of the device.
    #[inline]
    pub const fn zone_of(&self, offset: u64) -> u32 {
        (offset >> self.zone_shift) as u32
    }

    /// Where a zone starts.
    #[inline]
    pub const fn start(&self, zone: u32) -> u64 {
        (zone as u64) << self.zone_shift
    }

    /// Bytes of a zone.
    #[inline]
    pub fn len(&self, zone: u32) -> u64 {
        self.zone_size().min(self.size - self.start(zone))
    }

    /// Bytes of a zone that can be written.
    #[inline]
    pub fn capacity(&self, zone: u32) -> u64 {
        self.capacity.min(self.size - self.start(zone))
    }

    /// Whether a zone is written at its write pointer only.
    #[inline]
    pub const fn is_sequential(&self, zone: u32) -> bool {
        zone >= self.conventional
    }

    /// Whether open or active zones are limited.
    #[inline]
    pub const fn is_limited(&self) -> bool {
        self.max_open != 0 || self.max_active != 0
    }
}
