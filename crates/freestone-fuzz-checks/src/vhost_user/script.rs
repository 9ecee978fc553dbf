//! Generates the messages of a vhost-user frontend from an input.
//!
//! | bytes | content |
//! |---|---|
//! | 0 | the device (2 bits), a valid frontend connects next (if 2 bits are 0), negotiation of features first, a running queue first, disconnect without receiving |
//! | then, for each message | request (6 bits), `NEED_REPLY`, many files; kind of files; number of changes (4 bits), defect (4 bits) |
//! | for each change | offset and width; number |
//!
//! A message is valid, except for the changes. Numbers are small or near limits.

use super::files::{AVAIL, DESC, INFLIGHT, KINDS, Kind, MEMORY_BYTES, QUEUE, USED};
use super::wire::{
    ADD_MEM_REG, ALWAYS, GET_CONFIG, GET_FEATURES, GET_INFLIGHT_FD, GET_PROTOCOL_FEATURES, GET_VRING_BASE,
    GUEST, NEED_REPLY, PROTOCOL, PROTOCOL_FEATURES, REM_MEM_REG, RESET_DEVICE, SET_BACKEND_REQ_FD,
    SET_CONFIG, SET_FEATURES, SET_INFLIGHT_FD, SET_MEM_TABLE, SET_PROTOCOL_FEATURES, SET_VRING_ADDR,
    SET_VRING_BASE, SET_VRING_CALL, SET_VRING_ENABLE, SET_VRING_ERR, SET_VRING_KICK, SET_VRING_NUM, USER,
    addresses, message, region, u32s, u64s,
};

/// Maximum number of messages of an input, so that its check takes less than a millisecond.
const MOST: usize = 32;
/// Maximum number of files of an input. No message is added after this number is reached.
const MOST_FILES: usize = 100;

/// Request types that inputs select by additional numbers, so that they occur more often.
const OFTEN: [u32; 24] = [
    GET_FEATURES,
    SET_FEATURES,
    GET_PROTOCOL_FEATURES,
    SET_PROTOCOL_FEATURES,
    SET_MEM_TABLE,
    ADD_MEM_REG,
    REM_MEM_REG,
    SET_VRING_NUM,
    SET_VRING_ADDR,
    SET_VRING_BASE,
    GET_VRING_BASE,
    SET_VRING_KICK,
    SET_VRING_CALL,
    SET_VRING_ERR,
    SET_VRING_ENABLE,
    SET_BACKEND_REQ_FD,
    GET_CONFIG,
    SET_CONFIG,
    GET_INFLIGHT_FD,
    SET_INFLIGHT_FD,
    RESET_DEVICE,
    SET_VRING_ENABLE,
    SET_VRING_KICK,
    GET_VRING_BASE,
];

const NUMBERS: [u64; 32] = [
    GUEST,
    GUEST + MEMORY_BYTES,
    USER,
    USER + AVAIL,
    USER + USED,
    USER + MEMORY_BYTES,
    USER + MEMORY_BYTES - 64,
    MEMORY_BYTES - 1,
    MEMORY_BYTES,
    MEMORY_BYTES + 1,
    AVAIL,
    PROTOCOL,
    ALWAYS,
    PROTOCOL_FEATURES,
    128,
    255,
    256,
    257,
    512,
    1024,
    1025,
    2048,
    0x7fff,
    0xffff,
    0x1_0000,
    u32::MAX as u64,
    1 << 32,
    1 << 40,
    (1 << 62) - 4096,
    i64::MAX as u64,
    u64::MAX - 4095,
    u64::MAX,
];

/// Bytes and files that the frontend sends in one call.
#[derive(Debug)]
pub struct Part {
    pub bytes: Vec<u8>,
    pub files: Vec<Kind>,
}

/// Session of a frontend that is generated from an input.
#[allow(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
#[derive(Debug)]
pub struct Script {
    pub read_only: bool,
    pub zoned: bool,
    /// True if the check connects a second, valid frontend after the session of this script.
    pub another: bool,
    /// True if the frontend disconnects without receiving any reply.
    pub is_deaf: bool,
    pub parts: Vec<Part>,
}

impl Script {
    /// Generates the session of an input. Returns None if the input is empty.
    pub fn new(input: &[u8]) -> Option<Self> {
        let (&modes, mut rest) = input.split_first()?;
        let mut parts = Vec::new();
        if modes & 16 != 0 {
            // The server acknowledges messages only after REPLY_ACK was negotiated.
            for request in [SET_PROTOCOL_FEATURES, SET_FEATURES] {
                parts.push(valid_message(request, 0));
            }
        }
        if modes & 32 != 0 {
            let all = [
                ADD_MEM_REG,
                SET_VRING_NUM,
                SET_VRING_ADDR,
                SET_VRING_KICK,
                SET_VRING_CALL,
                SET_VRING_ENABLE,
            ];
            parts.extend(all.map(|request| valid_message(request, 0)));
        }
        let mut files = 0;
        while let Some((&[tag, which, shape], more)) = rest.split_first_chunk() {
            if parts.len() >= MOST || files >= MOST_FILES {
                break;
            }
            let before = parts.len();
            rest = add(&mut parts, tag, which, shape, more);
            files += parts[before..].iter().map(|part| part.files.len()).sum::<usize>();
        }
        Some(Self {
            read_only: modes & 1 != 0,
            zoned: modes & 2 != 0,
            another: modes & 0b1100 == 0,
            is_deaf: modes & 0xc0 == 0xc0,
            parts,
        })
    }
}

/// Adds the next message of the input to `parts`. Returns the rest of the input.
fn add<'a>(parts: &mut Vec<Part>, tag: u8, which: u8, shape: u8, mut rest: &'a [u8]) -> &'a [u8] {
    let request = u32::from(tag & 63);
    let request = if request < 40 { request } else { OFTEN[request as usize - 40] };
    let flags = if tag & 64 != 0 { NEED_REPLY } else { 0 };
    let mut part = valid_message(request, flags);
    for _ in 0..shape & 15 {
        let Some((&[place, number], more)) = rest.split_first_chunk() else { break };
        rest = more;
        let number = if number < 128 { number.into() } else { NUMBERS[usize::from(number % 32)] };
        let (at, width) = (12 + usize::from(place & 63) * 2, 1 << (place >> 6));
        let end = part.bytes.len().min(at + width);
        if at < end {
            part.bytes[at..end].copy_from_slice(&u64s(&[number])[..end - at]);
        }
    }
    match which {
        0 => {}
        1 => part.files.clear(),
        _ => {
            let count = if tag & 128 != 0 { usize::from(which >> 3) % 9 + 1 } else { 1 };
            part.files = vec![KINDS[usize::from(which & 7)]; count];
        }
    }
    let mut number = |most: usize| {
        let (&first, more) = rest.split_first().unwrap_or((&0, rest));
        rest = more;
        usize::from(first) % most
    };
    match shape >> 4 {
        9 => {
            // The size field of the header is replaced.
            let size = [0, 1, 8, 24, 40, 256, 1024, 1025][number(8)];
            part.bytes[8..12].copy_from_slice(&u32s(&[size]));
        }
        // The flags of the header are replaced: another version, or undefined flags.
        10 => part.bytes[4..8].copy_from_slice(&u32s(&[number(256) as u32])),
        11 => {
            let more = number(64);
            part.bytes.extend(std::iter::repeat_n(0, more));
            part = whole(part);
        }
        12 => {
            let fewer = part.bytes.len().saturating_sub(number(64)).max(12);
            part.bytes.truncate(fewer);
            part = whole(part);
        }
        13 => {
            // The body is replaced with bytes of the input.
            let n = number(64).min(rest.len());
            part.bytes.truncate(12);
            part.bytes.extend_from_slice(&rest[..n]);
            rest = &rest[n..];
            part = whole(part);
        }
        14 => {
            // The whole message is replaced with bytes of the input, without a valid header.
            let n = number(32).min(rest.len());
            part.bytes = rest[..n].to_vec();
            rest = &rest[n..];
        }
        15 => {
            // The message is sent in two parts, of which the second may be missing.
            let second_part = part.bytes.split_off(number(part.bytes.len()));
            let files = part.files.split_off(part.files.len() / 2);
            parts.push(part);
            if tag & 128 == 0 {
                parts.push(Part { bytes: second_part, files });
            }
            return rest;
        }
        _ => {}
    }
    if part.files.len() > 8 {
        // A call sends at most 8 files, so the body is sent with the other files in a second call.
        let second_part = part.bytes.split_off(part.bytes.len().min(12));
        let files = part.files.split_off(8);
        parts.push(part);
        part = Part { bytes: second_part, files };
    }
    parts.push(part);
    rest
}

/// Corrects the size field in the header of a message.
fn whole(mut part: Part) -> Part {
    let size = part.bytes.len() as u32 - 12;
    part.bytes[8..12].copy_from_slice(&u32s(&[size]));
    part
}

/// Returns a valid message for the given request type.
fn valid_message(request: u32, flags: u32) -> Part {
    let area = |bytes: u64, offset: u64| {
        [&u64s(&[bytes, offset])[..], &1_u16.to_ne_bytes(), &QUEUE.to_ne_bytes(), &[0; 4]].concat()
    };
    let memory = region(0, MEMORY_BYTES, USER);
    let (body, files) = match request {
        SET_FEATURES => (u64s(&[ALWAYS]), vec![]),
        SET_PROTOCOL_FEATURES => (u64s(&[PROTOCOL]), vec![]),
        SET_MEM_TABLE => ([&u32s(&[1, 0])[..], &memory[8..]].concat(), vec![Kind::Memory]),
        ADD_MEM_REG => (memory, vec![Kind::Memory]),
        REM_MEM_REG => (memory, vec![]),
        SET_VRING_NUM => (u32s(&[0, QUEUE.into()]), vec![]),
        SET_VRING_BASE | GET_VRING_BASE => (u32s(&[0, 0]), vec![]),
        SET_VRING_ADDR => (addresses(0, USER + DESC, USER + USED, USER + AVAIL), vec![]),
        SET_VRING_KICK => (u64s(&[0]), vec![Kind::Kick]),
        SET_VRING_CALL => (u64s(&[0]), vec![Kind::Call]),
        SET_VRING_ERR => (u64s(&[0]), vec![Kind::Err]),
        SET_VRING_ENABLE => (u32s(&[0, 1]), vec![]),
        SET_BACKEND_REQ_FD => (vec![], vec![Kind::Socket]),
        GET_CONFIG => ([u32s(&[0, 96, 0]), vec![0; 96]].concat(), vec![]),
        SET_CONFIG => ([&u32s(&[32, 1, 0])[..], &[1]].concat(), vec![]),
        GET_INFLIGHT_FD => (area(0, 0), vec![]),
        SET_INFLIGHT_FD => (area(128, INFLIGHT), vec![Kind::Memory]),
        _ => (vec![], vec![]),
    };
    Part { bytes: message(request, flags, &body), files }
}
