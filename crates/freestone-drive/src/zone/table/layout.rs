//! Layout of the zones of a device.

use freestone_core::device::ZoneGeometry;

/// Maximum size of a zone in bytes, limited by the write pointer field of the zone's state word.
pub const ZONE_SIZE_MAX_BYTES: u64 = 1 << 49;

/// Geometry and limits of a device's zones, which never change.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Size of the device in bytes.
    pub size: u64,
    /// Size of a logical block in bytes.
    pub block: u32,
    /// log2 of the zone size in bytes.
    pub zone_shift: u32,
    /// Number of writable bytes of a zone. A shorter last zone has fewer.
    pub capacity: u64,
    pub zones: u32,
    /// Number of conventional zones, at the start of the device.
    pub conventional: u32,
    /// Maximum number of open zones, or 0 for no limit.
    pub max_open: u32,
    /// Maximum number of active zones, or 0 for no limit.
    pub max_active: u32,
    /// Maximum size of a zone append in bytes, or 0 if append is not supported.
    pub max_append: u32,
}

impl Layout {
    pub fn geometry(&self) -> ZoneGeometry {
        ZoneGeometry {
            zone_size: self.zone_size(),
            nr_zones: self.zones,
            max_open: self.max_open,
            max_active: self.max_active,
            max_append: self.max_append,
        }
    }

    /// Returns the zone size in bytes.
    #[inline]
    pub const fn zone_size(&self) -> u64 {
        1 << self.zone_shift
    }

    /// Returns the number of the zone that contains byte `offset` of the device.
    #[inline]
    pub const fn zone_of(&self, offset: u64) -> u32 {
        (offset >> self.zone_shift) as u32
    }

    /// Returns the offset of the first byte of a zone.
    #[inline]
    pub const fn start(&self, zone: u32) -> u64 {
        (zone as u64) << self.zone_shift
    }

    /// Returns the length of a zone in bytes. The last zone may be shorter than the others.
    #[inline]
    pub fn len(&self, zone: u32) -> u64 {
        self.zone_size().min(self.size - self.start(zone))
    }

    /// Returns the number of writable bytes of a zone.
    #[inline]
    pub fn capacity(&self, zone: u32) -> u64 {
        self.capacity.min(self.size - self.start(zone))
    }

    #[inline]
    pub const fn is_sequential(&self, zone: u32) -> bool {
        zone >= self.conventional
    }

    #[inline]
    pub const fn is_limited(&self) -> bool {
        self.max_open != 0 || self.max_active != 0
    }
}
