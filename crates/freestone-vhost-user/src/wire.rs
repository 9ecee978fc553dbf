//! Messages of vhost-user and structures of virtio-blk. Messages are in native byte order;
//! structures of the driver are little-endian.

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Protocol version, in the flags of a message header.
pub const VERSION: u32 = 1;
/// Mask of the protocol version in the flags of a message header.
pub const VERSION_MASK: u32 = 3;
/// Flag of a message header: the message is a reply.
pub const REPLY: u32 = 4;
/// Flag of a message header: the frontend requests an acknowledgement.
pub const NEED_REPLY: u32 = 8;
/// Largest message body accepted, in bytes. Well above the largest valid body: 256 bytes of
/// configuration space and their header.
pub const MAX_BODY_BYTES: usize = 1024;
/// Maximum number of file descriptors in a message.
pub const MAX_FDS: usize = 8;

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Message number, one of [`message`].
    pub request: u32,
    pub flags: u32,
    pub size: u32,
}
const _: () = assert!(size_of::<Header>() == 12);

pub mod message {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
}

/// Messages from the backend to the frontend.
pub mod backend_message {
    pub const CONFIG_CHANGE: u32 = 2;
}

pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
}

pub mod feature {
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const ZONED: u64 = 1 << 17;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
}

/// Body of messages with a queue index and a number.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    pub index: u32,
    /// Size, base, or enabled flag of the queue.
    pub num: u32,
}
const _: () = assert!(size_of::<VringState>() == 8);

/// Addresses of a queue's rings, in the frontend's process.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringAddr {
    pub index: u32,
    /// Flags for dirty-page logging, which is not supported.
    pub flags: u32,
    pub desc: u64,
    pub used: u64,
    pub avail: u64,
    /// Address for dirty-page logging, which is not supported.
    pub log: u64,
}
const _: () = assert!(size_of::<VringAddr>() == 40);

/// Header of a memory table; the regions follow.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemTable {
    /// Number of regions.
    pub regions: u32,
    pub padding: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemRegion {
    /// Guest address, as used in descriptors.
    pub guest: u64,
    /// Length of the region in bytes.
    pub size: u64,
    /// Address in the frontend's process, as used for rings.
    pub user: u64,
    /// Offset of the region in its file, in bytes.
    pub offset: u64,
}
const _: () = assert!(size_of::<MemRegion>() == 32);

/// Body of messages that add or remove a memory region.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SingleRegion {
    pub padding: u64,
    pub region: MemRegion,
}
const _: () = assert!(size_of::<SingleRegion>() == 40);

/// Description of an in-flight log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct InflightArea {
    /// Length of the log in bytes.
    pub bytes: u64,
    /// Offset of the log in its file, in bytes.
    pub offset: u64,
    /// Number of queues.
    pub queues: u16,
    /// Number of entries per queue.
    pub size: u16,
    pub padding: [u8; 4],
}
const _: () = assert!(size_of::<InflightArea>() == 24);

/// Header of a part of the configuration space.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConfigPart {
    /// Offset of the part in the configuration space, in bytes.
    pub offset: u32,
    /// Length of the part in bytes.
    pub size: u32,
    /// Flags; not used.
    pub flags: u32,
}
const _: () = assert!(size_of::<ConfigPart>() == 12);

/// The configuration space of a block device, up to the last field that Freestone uses.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BlkConfig {
    /// Capacity in sectors of 512 bytes.
    pub capacity: U64,
    pub size_max: U32,
    /// Maximum number of data segments of a request.
    pub seg_max: U32,
    pub geometry: U32,
    /// Logical block size in bytes.
    pub blk_size: U32,
    /// log2 of the number of logical blocks per physical block.
    pub physical_block_exp: u8,
    /// Offset of the first physical block in logical blocks.
    pub alignment_offset: u8,
    /// Minimum I/O size in logical blocks.
    pub min_io_size: U16,
    /// Optimal I/O size in logical blocks.
    pub opt_io_size: U32,
    /// 1 if the device has a write-back cache.
    pub writeback: u8,
    pub unused0: u8,
    /// Maximum number of queues.
    pub num_queues: U16,
    /// Maximum number of sectors of a discard.
    pub max_discard_sectors: U32,
    /// Maximum number of ranges of a discard.
    pub max_discard_seg: U32,
    /// Discard alignment in sectors.
    pub discard_sector_alignment: U32,
    /// Maximum number of sectors of a write zeroes request.
    pub max_write_zeroes_sectors: U32,
    /// Maximum number of ranges of a write zeroes request.
    pub max_write_zeroes_seg: U32,
    /// 1 if write zeroes may deallocate the range.
    pub write_zeroes_may_unmap: u8,
    pub unused1: [u8; 3],
    pub secure_erase: [U32; 3],
    /// Zone size in sectors.
    pub zone_sectors: U32,
    /// Maximum number of open zones; 0 means no limit.
    pub max_open_zones: U32,
    /// Maximum number of active zones; 0 means no limit.
    pub max_active_zones: U32,
    /// Maximum number of sectors of a zone append.
    pub max_append_sectors: U32,
    /// Granularity of writes to zones in bytes.
    pub write_granularity: U32,
    /// Zone model: [`MODEL_HOST_MANAGED`], or 0 without zones.
    pub zone_model: u8,
    pub unused2: [u8; 3],
}
const _: () = assert!(size_of::<BlkConfig>() == 96);

/// The host-managed zone model.
pub const MODEL_HOST_MANAGED: u8 = 1;

/// Offset in bytes of [`BlkConfig::writeback`], the only field that the driver may write.
pub const WRITEBACK_OFFSET: u32 = 32;

/// An entry of a descriptor table.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Descriptor {
    /// Guest address of a segment or an indirect table.
    pub addr: U64,
    /// Length of the segment or table in bytes.
    pub len: U32,
    /// Bits of [`descriptor`].
    pub flags: U16,
    /// Index of the chain's next descriptor.
    pub next: U16,
}
const _: () = assert!(size_of::<Descriptor>() == DESCRIPTOR_BYTES);

pub const DESCRIPTOR_BYTES: usize = 16;

pub mod descriptor {
    /// The chain continues at the descriptor in `next`.
    pub const NEXT: u16 = 1;
    /// The device writes to the segment.
    pub const WRITE: u16 = 2;
    /// The segment is an indirect descriptor table.
    pub const INDIRECT: u16 = 4;
}

#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BlkHeader {
    /// Request type, one of [`request`].
    pub kind: U32,
    pub reserved: U32,
    pub sector: U64,
}
const _: () = assert!(size_of::<BlkHeader>() == 16);

pub mod request {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
    pub const ZONE_APPEND: u32 = 15;
    pub const ZONE_REPORT: u32 = 16;
    pub const ZONE_OPEN: u32 = 18;
    pub const ZONE_CLOSE: u32 = 20;
    pub const ZONE_FINISH: u32 = 22;
    pub const ZONE_RESET: u32 = 24;
    pub const ZONE_RESET_ALL: u32 = 26;
}

/// Data of a discard or write zeroes request.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BlkRange {
    pub sector: U64,
    pub sectors: U32,
    /// Bit 0: write zeroes may deallocate the range. Other bits are reserved.
    pub flags: U32,
}
const _: () = assert!(size_of::<BlkRange>() == 16);

pub mod status {
    pub const OK: u8 = 0;
    pub const IOERR: u8 = 1;
    /// The device does not support the request.
    pub const UNSUPP: u8 = 2;
    /// The zone's condition or the range does not permit the request.
    pub const ZONE_INVALID_CMD: u8 = 3;
    /// The write does not start at the write pointer.
    pub const ZONE_UNALIGNED_WP: u8 = 4;
    /// The limit of open zones is reached.
    pub const ZONE_OPEN_RESOURCE: u8 = 5;
    /// The limit of active zones is reached.
    pub const ZONE_ACTIVE_RESOURCE: u8 = 6;
}

/// Header of a zone report; the zones follow.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ZoneReport {
    pub zones: U64,
    pub reserved: [u8; 56],
}
const _: () = assert!(size_of::<ZoneReport>() == 64);

impl Default for ZoneReport {
    fn default() -> Self {
        Self { zones: 0.into(), reserved: [0; 56] }
    }
}

/// A zone descriptor. Positions and lengths are in sectors.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ZoneDescriptor {
    /// Writable size of the zone in sectors.
    pub capacity: U64,
    pub start: U64,
    pub write_pointer: U64,
    pub kind: u8,
    pub state: u8,
    pub reserved: [u8; 38],
}
const _: () = assert!(size_of::<ZoneDescriptor>() == 64);

impl Default for ZoneDescriptor {
    fn default() -> Self {
        let nothing = U64::ZERO;
        Self {
            capacity: nothing,
            start: nothing,
            write_pointer: nothing,
            kind: 0,
            state: 0,
            reserved: [0; 38],
        }
    }
}

/// Sector size in bytes, independent of the logical block size.
pub const SECTOR_BYTES: u64 = 512;
/// Length of the device name in the reply to `GET_ID`, in bytes.
pub const ID_BYTES: usize = 20;
