//! Constants and messages of vhost-user and virtio-blk, independent of the code under test.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

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

/// Header flag with which the frontend requests an acknowledgement.
pub const NEED_REPLY: u32 = 8;
/// Size of a message header in bytes.
pub const HEADER_BYTES: usize = 12;
/// Protocol features that a server must offer, and the bit of the acknowledgement feature.
pub const PROTOCOL: u64 = 1 << 15 | 1 << 13 | 1 << 12 | 1 << 9 | 1 << 5 | 1 << 3 | 1;
pub const REPLY_ACK: u64 = 1 << 3;

/// Feature bits of virtio-blk devices.
pub const RO: u64 = 1 << 5;
pub const FLUSH: u64 = 1 << 9;
pub const CONFIG_WCE: u64 = 1 << 11;
pub const DISCARD_AND_ZEROES: u64 = 1 << 13 | 1 << 14;
pub const ZONED: u64 = 1 << 17;
pub const INDIRECT: u64 = 1 << 28;
pub const EVENT_IDX: u64 = 1 << 29;
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
pub const VERSION_1: u64 = 1 << 32;
/// Feature bits that every device must offer.
pub const ALWAYS: u64 =
    VERSION_1 | PROTOCOL_FEATURES | EVENT_IDX | INDIRECT | 1 << 12 | 1 << 10 | 1 << 6 | 1 << 2;

/// Flags of a virtqueue descriptor.
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const TABLE: u16 = 4;

/// Request types of virtio-blk.
pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSHES: u32 = 4;
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

/// Status values of virtio-blk requests.
pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;
pub const ZONE_INVALID: u8 = 3;
pub const ZONE_WP: u8 = 4;
pub const ZONE_OPENS: u8 = 5;
pub const ZONE_ACTIVES: u8 = 6;

/// Base address of the memory for the driver (guest address) and for the frontend (user address).
pub const GUEST: u64 = 0x10_0000;
pub const USER: u64 = 0x7000_0000;

/// Encodes a vhost-user message with its header.
pub fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    [&u32s(&[request, 1 | flags, body.len() as u32]), body].concat()
}

pub fn u32s(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

pub fn u64s(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// Encodes the message body that announces a region of the guest memory.
pub fn region(from: u64, size: u64, user: u64) -> Vec<u8> {
    u64s(&[0, GUEST + from, size, user, from])
}

/// Encodes the message body that sets the ring addresses of a queue.
pub fn addresses(queue: u32, desc: u64, used: u64, avail: u64) -> Vec<u8> {
    [u32s(&[queue, 0]), u64s(&[desc, used, avail, 0])].concat()
}

/// Encodes the data of a discard or write zeroes request. `offset` and `len` are in bytes.
pub fn range(offset: u64, len: u64, may_free: bool) -> Vec<u8> {
    let mut bytes = (offset / 512).to_le_bytes().to_vec();
    bytes.extend(((len / 512) as u32).to_le_bytes());
    bytes.extend(u32::from(may_free).to_le_bytes());
    bytes
}

/// Sends bytes and descriptors without blocking. Returns the number of bytes sent, which may be
/// less than `bytes`.
pub fn send(socket: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> usize {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(files)), "at most eight");
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).unwrap_or(0)
}

/// Receives bytes and descriptors until the peer closes the connection. Returns both.
pub fn receive_until_close(socket: &UnixStream) -> (Vec<u8>, Vec<OwnedFd>) {
    let (mut heard, mut files) = (Vec::new(), Vec::new());
    let mut part = vec![0; 4096];
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [std::io::IoSliceMut::new(&mut part)];
        // An error means that the peer closed the connection while data was unread.
        let bytes = recvmsg(socket, into, &mut control, RecvFlags::CMSG_CLOEXEC).map_or(0, |got| got.bytes);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                files.extend(rights);
            }
        }
        if bytes == 0 {
            return (heard, files);
        }
        heard.extend_from_slice(&part[..bytes]);
    }
}
