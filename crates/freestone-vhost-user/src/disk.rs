//! The virtio features and the configuration space that a device offers to a frontend.

use freestone_core::bytes::Bytes;
use freestone_core::device::{Disk, Geometry};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::U32;

use crate::wire::{BlkConfig, MODEL_HOST_MANAGED, SECTOR_BYTES, feature};

/// Maximum number of queues of a device. A queue that is not enabled has no thread.
pub const MAX_QUEUES: usize = 64;
/// Largest data of one request in bytes. A larger request fails.
pub const MAX_REQUEST_BYTES: usize = 32 << 20;
/// Maximum number of data segments of a request. With header and status they fit into a queue of
/// 128 entries, QEMU's default.
pub const SEG_MAX: u32 = 126;
/// Maximum number of sectors of a discard or write zeroes (512 GiB). Some clients do not split
/// larger requests.
pub const MAX_RANGE_SECTORS: u32 = 1 << 30;
/// Size of the configuration space in bytes. Bytes after the known fields are zeroes.
pub const CONFIG_BYTES: usize = 256;

/// Returns the virtio features offered for a disk.
pub fn features(disk: &Disk) -> u64 {
    let geometry = disk.device.geometry();
    let mut features = feature::VERSION_1
        | feature::EVENT_IDX
        | feature::INDIRECT_DESC
        | feature::PROTOCOL_FEATURES
        | feature::SEG_MAX
        | feature::BLK_SIZE
        | feature::TOPOLOGY
        | feature::MQ;
    if geometry.volatile_cache {
        features |= feature::FLUSH | feature::CONFIG_WCE;
    }
    if geometry.zones.is_some() {
        features |= feature::ZONED;
    }
    if disk.read_only {
        features |= feature::RO;
    } else if geometry.zones.is_none() {
        features |= feature::DISCARD | feature::WRITE_ZEROES;
    }
    features
}

/// Returns the current configuration space. The capacity may change because devices can grow.
/// `writeback` is true if the driver uses a write-back cache.
pub fn config(disk: &Disk, writeback: bool) -> [u8; CONFIG_BYTES] {
    let geometry = disk.device.geometry();
    let block = logical_block_bytes(&geometry);
    let in_blocks = |bytes: u32| bytes / block;
    let zones = geometry.zones;
    let sectors = |bytes: u64| U32::new(u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX));
    let config = BlkConfig {
        capacity: (Bytes::user_geometry(geometry).size / SECTOR_BYTES).into(),
        seg_max: SEG_MAX.into(),
        blk_size: block.into(),
        physical_block_exp: (geometry.physical_block / block).max(1).ilog2() as u8,
        min_io_size: u16::try_from(in_blocks(geometry.io_min)).unwrap_or(u16::MAX).into(),
        opt_io_size: in_blocks(geometry.io_opt).into(),
        writeback: writeback.into(),
        num_queues: (MAX_QUEUES as u16).into(),
        max_discard_sectors: MAX_RANGE_SECTORS.into(),
        max_discard_seg: 1.into(),
        discard_sector_alignment: (geometry.discard_granularity / SECTOR_BYTES as u32).max(1).into(),
        max_write_zeroes_sectors: MAX_RANGE_SECTORS.into(),
        max_write_zeroes_seg: 1.into(),
        write_zeroes_may_unmap: 1,
        zone_sectors: zones.map_or(U32::ZERO, |zones| sectors(zones.zone_size)),
        max_open_zones: zones.map_or(0, |zones| zones.max_open).into(),
        max_active_zones: zones.map_or(0, |zones| zones.max_active).into(),
        max_append_sectors: zones.map_or(U32::ZERO, |zones| sectors(zones.max_append.into())),
        write_granularity: zones.map_or(0, |_| geometry.logical_block).into(),
        zone_model: if zones.is_some() { MODEL_HOST_MANAGED } else { 0 },
        ..BlkConfig::default()
    };
    let mut bytes = [0; CONFIG_BYTES];
    bytes[..size_of::<BlkConfig>()].copy_from_slice(config.as_bytes());
    bytes
}

/// Returns the logical block size in bytes. Firmware boots only from 512-byte sectors, and the
/// device serves requests smaller than its blocks. Zones must be written in the device's own
/// blocks.
fn logical_block_bytes(geometry: &Geometry) -> u32 {
    if geometry.zones.is_some() { geometry.logical_block } else { SECTOR_BYTES as u32 }
}
