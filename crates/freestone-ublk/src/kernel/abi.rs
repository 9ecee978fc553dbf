//! The interface of the kernel's ublk driver (`linux/ublk_cmd.h`): command numbers, flags and
//! structures. All integers are in native byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Sector size in bytes, independent of the logical block size.
pub const SECTOR_BYTES: u64 = 512;
/// Exclusive upper limit of device ids.
pub const MAX_ID: u32 = 1 << 20;
/// Maximum queue depth of the driver. In the mapping of the character device, the descriptor arrays
/// of two queues are this many descriptors apart.
pub const MAX_QUEUE_DEPTH: u16 = 4096;

/// Returns the offset of a tag's data in the character device, in bytes, for servers that use user
/// copy.
pub const fn data_offset(queue: u16, tag: u16) -> u64 {
    0x8000_0000 + ((queue as u64) << 41) + ((tag as u64) << 25)
}

/// ioctl direction: the driver reads the argument.
const READ: u32 = 2;
/// ioctl direction: the driver reads and writes the argument.
const READ_WRITE: u32 = 3;

/// Encodes a command like an ioctl number, in ublk's group `u`.
const fn encoded(direction: u32, bytes: usize, number: u32) -> u32 {
    (direction << 30) | ((bytes as u32) << 16) | ((b'u' as u32) << 8) | number
}

/// Commands to `/dev/ublk-control`.
pub mod control {
    use super::{CtrlCmd, READ, READ_WRITE, encoded};

    const fn command(direction: u32, number: u32) -> u32 {
        encoded(direction, size_of::<CtrlCmd>(), number)
    }

    pub const GET_DEV_INFO: u32 = command(READ, 0x02);
    /// `GET_DEV_INFO` with the path of the character device.
    pub const GET_DEV_INFO2: u32 = command(READ, 0x12);
    pub const ADD_DEV: u32 = command(READ_WRITE, 0x04);
    pub const DEL_DEV: u32 = command(READ_WRITE, 0x05);
    pub const START_DEV: u32 = command(READ_WRITE, 0x06);
    pub const STOP_DEV: u32 = command(READ_WRITE, 0x07);
    pub const SET_PARAMS: u32 = command(READ_WRITE, 0x08);
    pub const GET_PARAMS: u32 = command(READ, 0x09);
    pub const START_USER_RECOVERY: u32 = command(READ_WRITE, 0x10);
    pub const END_USER_RECOVERY: u32 = command(READ_WRITE, 0x11);
    pub const GET_FEATURES: u32 = command(READ, 0x13);
    pub const DEL_DEV_ASYNC: u32 = command(READ, 0x14);
    pub const UPDATE_SIZE: u32 = command(READ_WRITE, 0x15);
    pub const TRY_STOP_DEV: u32 = command(READ_WRITE, 0x17);
}

/// Commands of a queue to the character device.
pub mod io {
    use super::{IoCmd, READ_WRITE, encoded};

    const fn command(number: u32) -> u32 {
        encoded(READ_WRITE, size_of::<IoCmd>(), number)
    }

    pub const FETCH_REQ: u32 = command(0x20);
    pub const COMMIT_AND_FETCH_REQ: u32 = command(0x21);
}
const _: () = assert!(control::ADD_DEV == 0xc020_7504 && control::GET_FEATURES == 0x8020_7513);
const _: () = assert!(io::FETCH_REQ == 0xc010_7520 && io::COMMIT_AND_FETCH_REQ == 0xc010_7521);

/// Feature bits (`UBLK_F_*`).
pub mod feature {
    /// The device survives its server, and waits for the next one.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// The next server gets the requests that the former one has not completed.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// The device belongs to an unprivileged user.
    pub const UNPRIVILEGED_DEV: u64 = 1 << 5;
    /// Commands are encoded like ioctl numbers.
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// The server copies data itself, by reads and writes of the character device.
    pub const USER_COPY: u64 = 1 << 7;
    /// The block device is zoned.
    pub const ZONED: u64 = 1 << 8;
    /// The size of a live device can change (`UPDATE_SIZE`).
    pub const UPDATE_SIZE: u64 = 1 << 10;
    /// The command `TRY_STOP_DEV` exists, which stops the device only if no process has it open.
    pub const SAFE_STOP_DEV: u64 = 1 << 17;
}

/// Device states ([`DevInfo::state`]).
pub mod state {
    #[cfg(test)]
    pub const DEAD: u16 = 0;
    pub const LIVE: u16 = 1;
    /// The server has ended, and requests wait for the next one.
    pub const QUIESCED: u16 = 2;
}

/// Operations of a request.
pub mod op {
    pub const READ: u8 = 0;
    pub const WRITE: u8 = 1;
    pub const FLUSH: u8 = 2;
    pub const DISCARD: u8 = 3;
    pub const WRITE_ZEROES: u8 = 5;
    pub const ZONE_OPEN: u8 = 10;
    pub const ZONE_CLOSE: u8 = 11;
    pub const ZONE_FINISH: u8 = 12;
    pub const ZONE_APPEND: u8 = 13;
    pub const ZONE_RESET_ALL: u8 = 14;
    pub const ZONE_RESET: u8 = 15;
    pub const REPORT_ZONES: u8 = 18;
}

/// Flags of a request that the server obeys. The driver's other flags are hints.
pub mod op_flag {
    /// The write must be durable before it completes.
    pub const FUA: u32 = 1 << 13;
    /// Write zeroes must not deallocate the range.
    pub const NOUNMAP: u32 = 1 << 15;
}

pub mod attr {
    pub const READ_ONLY: u32 = 1 << 0;
    pub const ROTATIONAL: u32 = 1 << 1;
    pub const VOLATILE_CACHE: u32 = 1 << 2;
    pub const FUA: u32 = 1 << 3;
}

pub mod param {
    pub const BASIC: u32 = 1 << 0;
    pub const DISCARD: u32 = 1 << 1;
    pub const ZONED: u32 = 1 << 3;
}

/// The payload of every control command (`ublksrv_ctrl_cmd`).
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CtrlCmd {
    /// Device id; `u32::MAX` if the device does not exist yet.
    pub dev_id: u32,
    /// Queue id; `u16::MAX` for commands to the whole device.
    pub queue_id: u16,
    /// Length of the buffer at `addr`, in bytes.
    pub len: u16,
    /// Address of the command's buffer.
    pub addr: u64,
    /// Inline argument of the command, for example a process id or a size.
    pub data: u64,
    /// Length of the character device's path at the start of the buffer, including the terminating
    /// NUL. Used only for unprivileged devices and `GET_DEV_INFO2`; the command's own data follows.
    pub dev_path_len: u16,
    pub pad: u16,
    pub reserved: u32,
}
const _: () = assert!(size_of::<CtrlCmd>() == 32);

impl CtrlCmd {
    /// Creates a command to a whole device.
    pub const fn new(dev_id: u32, data: u64) -> Self {
        Self { dev_id, queue_id: u16::MAX, len: 0, addr: 0, data, dev_path_len: 0, pad: 0, reserved: 0 }
    }
}

/// Device information (`ublksrv_ctrl_dev_info`): the argument of `ADD_DEV`, and the driver's reply.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DevInfo {
    /// Number of queues.
    pub nr_hw_queues: u16,
    /// Queue depth.
    pub queue_depth: u16,
    /// State of the device, one of [`state`].
    pub state: u16,
    pub pad0: u16,
    /// Largest request in bytes.
    pub max_io_buf_bytes: u32,
    pub dev_id: u32,
    /// Process id of the server, or -1 if no process serves the device.
    pub ublksrv_pid: i32,
    pub pad1: u32,
    /// Features of the device: bits of [`feature`].
    pub flags: u64,
    /// Bits for the server's own use. The driver stores them but does not interpret them.
    pub ublksrv_flags: u64,
    /// User id of the creator.
    pub owner_uid: u32,
    /// Group id of the creator.
    pub owner_gid: u32,
    pub reserved: [u64; 2],
}
const _: () = assert!(size_of::<DevInfo>() == 64);

/// Basic parameters, mandatory for every device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamBasic {
    /// Attributes of the device: bits of [`attr`].
    pub attrs: u32,
    /// log2 of the logical block size in bytes.
    pub logical_bs_shift: u8,
    /// log2 of the physical block size in bytes.
    pub physical_bs_shift: u8,
    /// log2 of the optimal I/O size in bytes.
    pub io_opt_shift: u8,
    /// log2 of the minimum I/O size in bytes.
    pub io_min_shift: u8,
    /// Maximum request size in sectors.
    pub max_sectors: u32,
    /// Requests do not cross multiples of this number of sectors; for zoned devices, the zone size.
    pub chunk_sectors: u32,
    /// Device size in sectors.
    pub dev_sectors: u64,
    /// Alignment mask of memory segments; 0 means no requirement.
    pub virt_boundary_mask: u64,
}
const _: () = assert!(size_of::<ParamBasic>() == 32);

/// Parameters for discard and write zeroes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamDiscard {
    /// Offset of the first discard unit in bytes.
    pub discard_alignment: u32,
    /// Discard unit in bytes; must not be zero.
    pub discard_granularity: u32,
    /// Maximum size of a discard in sectors; 0 if discard is not supported.
    pub max_discard_sectors: u32,
    /// Maximum size of a write zeroes request in sectors; 0 if write zeroes is not supported.
    pub max_write_zeroes_sectors: u32,
    /// Maximum number of ranges in a discard.
    pub max_discard_segments: u16,
    pub reserved: u16,
}
const _: () = assert!(size_of::<ParamDiscard>() == 20);

/// Parameters of a zoned device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamZoned {
    /// Maximum number of open zones; 0 means no limit.
    pub max_open_zones: u32,
    /// Maximum number of active zones; 0 means no limit.
    pub max_active_zones: u32,
    /// Maximum size of an append in sectors; must not be zero.
    pub max_zone_append_sectors: u32,
    pub reserved: [u32; 5],
}
const _: () = assert!(size_of::<ParamZoned>() == 32);

/// Parameters of a device (`ublk_params`), up to the last group that Freestone uses. The driver
/// reads `len` bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Params {
    /// Size of this structure in bytes.
    pub len: u32,
    /// Bits of [`param`]: the parameter groups that are present.
    pub types: u32,
    pub basic: ParamBasic,
    /// Present unless the device is read-only or zoned.
    pub discard: ParamDiscard,
    /// Major and minor numbers of the device nodes, written by the driver only.
    pub numbers: [u32; 4],
    pub zoned: ParamZoned,
    /// First field of the next group, which Freestone does not use.
    pub unused: u32,
}
const _: () = assert!(size_of::<Params>() == 112);

/// A request descriptor (`ublksrv_io_desc`), in memory that the driver writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IoDesc {
    /// The operation, one of [`op`], in the low byte, and [`op_flag`] bits above.
    pub op_flags: u32,
    /// Length in sectors; for a zone report, the number of zones.
    pub nr_sectors: u32,
    pub start_sector: u64,
    /// Address of the tag's buffer, as passed by the last fetch or commit.
    pub addr: u64,
}
const _: () = assert!(size_of::<IoDesc>() == IO_DESC_BYTES);

/// Size of a request descriptor in bytes.
pub const IO_DESC_BYTES: usize = 24;

impl IoDesc {
    /// Returns the operation, one of [`op`].
    pub const fn op(&self) -> u8 {
        self.op_flags as u8
    }
}

/// The payload of every queue command (`ublksrv_io_cmd`).
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IoCmd {
    /// Queue id.
    pub q_id: u16,
    pub tag: u16,
    /// Result of the tag's previous request: a number of bytes, or a negative errno.
    pub result: i32,
    /// Address of the buffer that holds read data and receives the next request's data. With user
    /// copy, the sector to which an append wrote, or 0.
    pub addr: u64,
}
const _: () = assert!(size_of::<IoCmd>() == 16);

/// A zone in a report (`blk_zone`). Positions and lengths are in sectors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ZoneRow {
    pub start: u64,
    /// Length of the zone; 0 in unused rows after the last zone.
    pub len: u64,
    pub write_pointer: u64,
    /// Zone type (`blk_zone_type`).
    pub kind: u8,
    /// Zone condition (`blk_zone_cond`).
    pub condition: u8,
    /// Flags of host-aware drives, and padding; always zero.
    pub unused: [u8; 6],
    /// Writable size of the zone.
    pub capacity: u64,
    pub reserved: [u8; 24],
}
const _: () = assert!(size_of::<ZoneRow>() == 64);
