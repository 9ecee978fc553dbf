//! The interface of the kernel's driver (`linux/ublk_cmd.h`): numbers, and structures as they lie in
//! memory. All in the byte order of the machine.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a sector, whatever the logical block is.
pub const SECTOR_BYTES: u64 = 512;
/// Ids of devices are below this.
pub const MAX_ID: u32 = 1 << 20;
/// Descriptors that a queue may have; the arrays of two queues are so many apart in the mapping.
pub const MAX_QUEUE_DEPTH: u16 = 4096;

/// Where the data of a tag's request lies in the character device, for servers that copy it
/// themselves.
pub const fn data_offset(queue: u16, tag: u16) -> u64 {
    0x8000_0000 + ((queue as u64) << 41) + ((tag as u64) << 25)
}

/// The argument goes to the driver.
const READ: u32 = 2;
/// It goes both ways.
const READ_WRITE: u32 = 3;

/// The number of a command as ioctls are numbered, in a group of ublk's own.
const fn encoded(direction: u32, bytes: usize, number: u32) -> u32 {
    (direction << 30) | ((bytes as u32) << 16) | ((b'u' as u32) << 8) | number
}

/// Commands to the control device.
pub mod control {
    use super::{CtrlCmd, READ, READ_WRITE, encoded};

    const fn command(direction: u32, number: u32) -> u32 {
        encoded(direction, size_of::<CtrlCmd>(), number)
    }

    pub const GET_DEV_INFO: u32 = command(READ, 0x02);
    /// The same for who names the character device.
    pub const GET_DEV_INFO2: u32 = command(READ, 0x12);
    pub const ADD_DEV: u32 = command(READ_WRITE, 0x04);
    pub const DEL_DEV: u32 = command(READ_WRITE, 0x05);
    pub const START_DEV: u32 = command(READ_WRITE, 0x06);
    pub const STOP_DEV: u32 = command(READ_WRITE, 0x07);
    pub const SET_PARAMS: u32 = command(READ_WRITE, 0x08);
    pub const GET_FEATURES: u32 = command(READ, 0x13);
    pub const DEL_DEV_ASYNC: u32 = command(READ, 0x14);
    pub const UPDATE_SIZE: u32 = command(READ_WRITE, 0x15);
    pub const TRY_STOP_DEV: u32 = command(READ_WRITE, 0x17);
}

/// Commands to the character device of a queue.
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

/// Bits of features.
pub mod feature {
    /// The device is a user's without privileges.
    pub const UNPRIVILEGED_DEV: u64 = 1 << 5;
    /// Commands are numbered as ioctls are.
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// The server copies data itself, by reads and writes of the character device.
    pub const USER_COPY: u64 = 1 << 7;
    /// A device with zones.
    pub const ZONED: u64 = 1 << 8;
    /// The device may get another size.
    pub const UPDATE_SIZE: u64 = 1 << 10;
    /// The device can be stopped on the condition that nobody has it open.
    pub const SAFE_STOP_DEV: u64 = 1 << 17;
}

/// States of a device.
pub mod state {
    #[cfg(test)]
    pub const DEAD: u16 = 0;
    pub const LIVE: u16 = 1;
}

/// What a request asks for.
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

/// Flags of a request; the others are hints.
pub mod op_flag {
    /// Durable before it is answered.
    pub const FUA: u32 = 1 << 13;
    /// Zeroes must not become a hole.
    pub const NOUNMAP: u32 = 1 << 15;
}

/// Bits of [`ParamBasic::attrs`].
pub mod attr {
    pub const READ_ONLY: u32 = 1 << 0;
    pub const ROTATIONAL: u32 = 1 << 1;
    pub const VOLATILE_CACHE: u32 = 1 << 2;
    pub const FUA: u32 = 1 << 3;
}

/// Bits of [`Params::types`].
pub mod param {
    pub const BASIC: u32 = 1 << 0;
    pub const DISCARD: u32 = 1 << 1;
    pub const ZONED: u32 = 1 << 3;
}

/// Part of each command to the control device.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CtrlCmd {
    /// Which device; all ones where there is none yet.
    pub dev_id: u32,
    /// All ones where it is not about one queue.
    pub queue_id: u16,
    /// Bytes at `addr`.
    pub len: u16,
    /// What goes with the command.
    pub addr: u64,
    /// A number that goes with it.
    pub data: u64,
    /// Of what is at `addr`, bytes of the character device's path, with a zero at its end; then comes
    /// what else there is. Only in commands to devices of users without privileges.
    pub dev_path_len: u16,
    /// Nothing.
    pub pad: u16,
    /// Nothing.
    pub reserved: u32,
}
const _: () = assert!(size_of::<CtrlCmd>() == 32);

impl CtrlCmd {
    /// About a device as a whole.
    pub const fn new(dev_id: u32, data: u64) -> Self {
        Self { dev_id, queue_id: u16::MAX, len: 0, addr: 0, data, dev_path_len: 0, pad: 0, reserved: 0 }
    }
}

/// A device, as asked for and as it is.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DevInfo {
    /// Queues.
    pub nr_hw_queues: u16,
    /// Requests of each.
    pub queue_depth: u16,
    /// [`state`].
    pub state: u16,
    /// Nothing.
    pub pad0: u16,
    /// Largest request.
    pub max_io_buf_bytes: u32,
    /// Which it is.
    pub dev_id: u32,
    /// The process that serves it; -1 where none does.
    pub ublksrv_pid: i32,
    /// Nothing.
    pub pad1: u32,
    /// [`feature`].
    pub flags: u64,
    /// The server's own: the driver keeps it, and does not look.
    pub ublksrv_flags: u64,
    /// Who made it.
    pub owner_uid: u32,
    /// The same.
    pub owner_gid: u32,
    /// Nothing.
    pub reserved: [u64; 2],
}
const _: () = assert!(size_of::<DevInfo>() == 64);

/// What every device has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamBasic {
    /// [`attr`].
    pub attrs: u32,
    /// The logical block, as a power of two.
    pub logical_bs_shift: u8,
    /// The physical one.
    pub physical_bs_shift: u8,
    /// Preferred request for streaming.
    pub io_opt_shift: u8,
    /// Preferred smallest request.
    pub io_min_shift: u8,
    /// Of one request.
    pub max_sectors: u32,
    /// Boundaries that no request crosses.
    pub chunk_sectors: u32,
    /// The size.
    pub dev_sectors: u64,
    /// Of memory segments.
    pub virt_boundary_mask: u64,
}
const _: () = assert!(size_of::<ParamBasic>() == 32);

/// What a device has that frees ranges, or zeroes them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamDiscard {
    /// Of the first unit, in bytes.
    pub discard_alignment: u32,
    /// A unit in bytes; not zero.
    pub discard_granularity: u32,
    /// Of one request.
    pub max_discard_sectors: u32,
    /// The same.
    pub max_write_zeroes_sectors: u32,
    /// Ranges of one request: 1.
    pub max_discard_segments: u16,
    /// Nothing.
    pub reserved: u16,
}
const _: () = assert!(size_of::<ParamDiscard>() == 20);

/// What a device with zones has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamZoned {
    /// Open at once; 0 is no limit.
    pub max_open_zones: u32,
    /// Open or closed at once; 0 is no limit.
    pub max_active_zones: u32,
    /// Of one append; not zero.
    pub max_zone_append_sectors: u32,
    /// Nothing.
    pub reserved: [u32; 5],
}
const _: () = assert!(size_of::<ParamZoned>() == 32);

/// Parameters, as far as they are used here: the driver takes as many bytes as `len` says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Params {
    /// Bytes of this structure.
    pub len: u32,
    /// [`param`]: which are meant.
    pub types: u32,
    /// Mandatory.
    pub basic: ParamBasic,
    /// Absent where the device is read-only, or has zones.
    pub discard: ParamDiscard,
    /// The numbers of nodes, which only the driver says.
    pub numbers: [u32; 4],
    /// Of a device with zones.
    pub zoned: ParamZoned,
    /// The first field of what is not used.
    pub unused: u32,
}
const _: () = assert!(size_of::<Params>() == 112);

/// A request, in memory of the driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IoDesc {
    /// [`op`] in the low byte, [`op_flag`] above.
    pub op_flags: u32,
    /// Length; of a report, in zones.
    pub nr_sectors: u32,
    /// Where.
    pub start_sector: u64,
    /// The buffer that it was fetched with.
    pub addr: u64,
}
const _: () = assert!(size_of::<IoDesc>() == IO_DESC_BYTES);

/// Bytes of a descriptor.
pub const IO_DESC_BYTES: usize = 24;

impl IoDesc {
    /// [`op`].
    pub const fn op(&self) -> u8 {
        self.op_flags as u8
    }
}

/// Part of each command of a queue.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IoCmd {
    /// Which queue.
    pub q_id: u16,
    /// Which of its requests.
    pub tag: u16,
    /// The outcome of the one before: bytes, or a negative errno.
    pub result: i32,
    /// The buffer: for what that one has read, then for the next one. Nothing where the server copies
    /// data itself, but for an append the sector that it went to.
    pub addr: u64,
}
const _: () = assert!(size_of::<IoCmd>() == 16);

/// A zone in a report; all in sectors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ZoneRow {
    /// Where it begins.
    pub start: u64,
    /// Its length; 0 behind the last row.
    pub len: u64,
    /// Its write pointer.
    pub write_pointer: u64,
    /// [`zone_type`].
    pub kind: u8,
    /// [`zone_condition`].
    pub condition: u8,
    /// Flags of drives that advise, and padding.
    pub unused: [u8; 6],
    /// What can be written of it.
    pub capacity: u64,
    /// Nothing.
    pub reserved: [u8; 24],
}
const _: () = assert!(size_of::<ZoneRow>() == 64);
