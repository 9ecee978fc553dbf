//! Messages of vhost-user, as they are on the socket, and the numbers of virtio-blk. Messages are
//! in the byte order of the machine, what a driver sees is little-endian.

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version 1 of the protocol, in a header's flags.
pub const VERSION: u32 = 1;
/// The bits of the version.
pub const VERSION_MASK: u32 = 3;
/// The message answers one.
pub const REPLY: u32 = 4;
/// The frontend wants an answer also where the message has none by itself.
pub const NEED_REPLY: u32 = 8;
/// Largest body of a message in bytes: a whole configuration space has 256.
pub const MAX_BODY_BYTES: usize = 1024;
/// Most file descriptors of a message.
pub const MAX_FDS: usize = 8;

/// In front of each message.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// What is asked: [`message`].
    pub request: u32,
    /// Version and flags.
    pub flags: u32,
    /// Bytes of the body.
    pub size: u32,
}
const _: () = assert!(size_of::<Header>() == 12);

/// Numbers of messages.
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

/// Numbers of messages to the frontend.
pub mod backend_message {
    pub const CONFIG_CHANGE: u32 = 2;
}

/// Bits of protocol features.
pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
}

/// Bits of features.
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

/// A queue and a number.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    /// Which queue.
    pub index: u32,
    /// Its size, base, or whether it is enabled.
    pub num: u32,
}
const _: () = assert!(size_of::<VringState>() == 8);

/// Where a queue's rings are, in the frontend's own addresses.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringAddr {
    /// Which queue.
    pub index: u32,
    /// Of logging, which is not offered.
    pub flags: u32,
    /// The descriptors.
    pub desc: u64,
    /// The used ring.
    pub used: u64,
    /// The available ring.
    pub avail: u64,
    /// Of logging.
    pub log: u64,
}
const _: () = assert!(size_of::<VringAddr>() == 40);

/// In front of the regions of a memory table.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemTable {
    /// Regions that follow.
    pub regions: u32,
    /// Nothing.
    pub padding: u32,
}

/// A part of the frontend's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemRegion {
    /// Its address in descriptors.
    pub guest: u64,
    /// Bytes.
    pub size: u64,
    /// Its address in the frontend, which ring addresses are in.
    pub user: u64,
    /// Where it begins in its file.
    pub offset: u64,
}
const _: () = assert!(size_of::<MemRegion>() == 32);

/// One region, added or removed.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SingleRegion {
    /// Nothing.
    pub padding: u64,
    /// The region.
    pub region: MemRegion,
}
const _: () = assert!(size_of::<SingleRegion>() == 40);

/// Memory in which requests that are in flight are noted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct InflightArea {
    /// Bytes.
    pub bytes: u64,
    /// Where it begins in its file.
    pub offset: u64,
    /// Queues.
    pub queues: u16,
    /// Entries of each.
    pub size: u16,
    /// Nothing.
    pub padding: [u8; 4],
}
const _: () = assert!(size_of::<InflightArea>() == 24);

/// In front of a part of the configuration space.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConfigPart {
    /// First byte.
    pub offset: u32,
    /// Bytes.
    pub size: u32,
    /// Who writes.
    pub flags: u32,
}
const _: () = assert!(size_of::<ConfigPart>() == 12);

/// The configuration space of a block device, as far as it is filled.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BlkConfig {
    /// Sectors of 512 bytes.
    pub capacity: U64,
    /// Not offered.
    pub size_max: U32,
    /// Segments of data in a request.
    pub seg_max: U32,
    /// Not offered.
    pub geometry: U32,
    /// The logical block in bytes.
    pub blk_size: U32,
    /// Logical blocks of a physical one, as a power of two.
    pub physical_block_exp: u8,
    /// Of the first physical block.
    pub alignment_offset: u8,
    /// Preferred smallest request in logical blocks.
    pub min_io_size: U16,
    /// Preferred request for streaming in logical blocks.
    pub opt_io_size: U32,
    /// Writes may sit in a cache.
    pub writeback: u8,
    /// Nothing.
    pub unused0: u8,
    /// Queues.
    pub num_queues: U16,
    /// Of one range.
    pub max_discard_sectors: U32,
    /// Ranges of a request.
    pub max_discard_seg: U32,
    /// What a discard should be aligned to, in sectors.
    pub discard_sector_alignment: U32,
    /// Of one range.
    pub max_write_zeroes_sectors: U32,
    /// Ranges of a request.
    pub max_write_zeroes_seg: U32,
    /// Zeroes may become a hole.
    pub write_zeroes_may_unmap: u8,
    /// Nothing.
    pub unused1: [u8; 3],
    /// Not offered.
    pub secure_erase: [U32; 3],
    /// Of a zone.
    pub zone_sectors: U32,
    /// Zones that may be open at once; 0 is no limit.
    pub max_open_zones: U32,
    /// Zones that may be open or closed at once; 0 is no limit.
    pub max_active_zones: U32,
    /// Largest zone append.
    pub max_append_sectors: U32,
    /// What writes to zones are a multiple of, in bytes.
    pub write_granularity: U32,
    /// [`MODEL_HOST_MANAGED`], or 0.
    pub zone_model: u8,
    /// Nothing.
    pub unused2: [u8; 3],
}
const _: () = assert!(size_of::<BlkConfig>() == 96);

/// Zones are written at their write pointers only.
pub const MODEL_HOST_MANAGED: u8 = 1;

/// Where in the configuration space the driver says whether writes may sit in a cache.
pub const WRITEBACK_OFFSET: u32 = 32;

/// An entry of a descriptor table.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Descriptor {
    /// Of a buffer, or of an indirect table.
    pub addr: U64,
    /// Bytes.
    pub len: U32,
    /// [`descriptor`].
    pub flags: U16,
    /// The next of the chain.
    pub next: U16,
}
const _: () = assert!(size_of::<Descriptor>() == DESCRIPTOR_BYTES);

/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: usize = 16;

/// Flags of descriptors.
pub mod descriptor {
    /// Another follows.
    pub const NEXT: u16 = 1;
    /// The device writes there.
    pub const WRITE: u16 = 2;
    /// It is a table of descriptors.
    pub const INDIRECT: u16 = 4;
}

/// In front of each request.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BlkHeader {
    /// What to do: [`request`].
    pub kind: U32,
    /// Nothing.
    pub reserved: U32,
    /// First sector.
    pub sector: U64,
}
const _: () = assert!(size_of::<BlkHeader>() == 16);

/// Types of requests.
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

/// What a discard or write zeroes is for.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BlkRange {
    /// First sector.
    pub sector: U64,
    /// Sectors.
    pub sectors: U32,
    /// Bit 0: zeroes may become a hole.
    pub flags: U32,
}
const _: () = assert!(size_of::<BlkRange>() == 16);

/// Status of a request.
pub mod status {
    /// It is done.
    pub const OK: u8 = 0;
    /// It failed.
    pub const IOERR: u8 = 1;
    /// The device has no such request.
    pub const UNSUPP: u8 = 2;
    /// The zone's condition, or its place, forbids it.
    pub const ZONE_INVALID_CMD: u8 = 3;
    /// Not at the write pointer.
    pub const ZONE_UNALIGNED_WP: u8 = 4;
    /// Too many open zones.
    pub const ZONE_OPEN_RESOURCE: u8 = 5;
    /// Too many active zones.
    pub const ZONE_ACTIVE_RESOURCE: u8 = 6;
}

/// In front of a report of zones.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ZoneReport {
    /// Zones that follow.
    pub zones: U64,
    /// Nothing.
    pub reserved: [u8; 56],
}
const _: () = assert!(size_of::<ZoneReport>() == 64);

impl Default for ZoneReport {
    fn default() -> Self {
        Self { zones: 0.into(), reserved: [0; 56] }
    }
}

/// A zone; all in sectors.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ZoneDescriptor {
    /// How much of it can be written.
    pub capacity: U64,
    /// Where it begins.
    pub start: U64,
    /// Where the next write goes.
    pub write_pointer: U64,
    /// [`zone_type`].
    pub kind: u8,
    /// [`zone_state`].
    pub state: u8,
    /// Nothing.
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

/// Bytes of a sector, whatever the logical block is.
pub const SECTOR_BYTES: u64 = 512;
/// Bytes of a device's name, as far as drivers see it.
pub const ID_BYTES: usize = 20;
