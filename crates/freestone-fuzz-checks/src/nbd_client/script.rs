//! Generates the bytes of an NBD server from an input.
//!
//! | bytes | content |
//! |---|---|
//! | 0 | structured replies, the allocation context, no `GO`, no flags of the fixed handshake, zeroes after the export; 32 and 64: a sound server follows this one |
//! | 1 | block sizes (2 bits), size (2 bits), flags of the export (3 bits) |
//! | 2 | number of changes of the handshake (2 bits), number of requests (3 bits) |
//! | for each change, 4 bytes | offset; kind; value; length |
//! | for each request, 2 bytes | command; length and offset |
//! | for each reply, 4 bytes | kind (4 bits), request (4 bits), 3 numbers |
//!
//! The handshake is valid, except for the changes. The script has no requests if the disk of the handshake
//! has no room for them, or if the handshake has surplus bytes.

use freestone::device::Geometry;
use freestone_nbd_proto::{TransmissionFlags, command, option};

use super::facts::{self, Facts};
use super::requests::{Answer, SentRequest};

const SIZE: u64 = 1 << 20;
/// Size in bytes of the part of the disk for one request.
const PART: u64 = 64 << 10;
const REPLIES_MAX: usize = 64;
const CONTEXT: u32 = 7;

#[derive(Debug)]
pub struct Script {
    /// Server's side of the handshake.
    pub handshake: Vec<u8>,
    /// Expected result of the handshake; None if the client must refuse it.
    pub facts: Option<Facts>,
    pub requests: Vec<SentRequest>,
    replies: Vec<[u8; 4]>,
    is_followed: bool,
}

pub fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let words = [option, kind, data.len() as u32].map(u32::to_be_bytes);
    [&0x0003_e889_0455_65a9_u64.to_be_bytes()[..], words.as_flattened(), data].concat()
}

/// Returns the server's side of a valid handshake.
fn handshake(modes: u8, export_kind: u8) -> Vec<u8> {
    let has = |bit: u8| modes & bit != 0;
    let flags = u16::from(!has(8)) | u16::from(!has(16)) << 1;
    let mut bytes = [&b"NBDMAGICIHAVEOPT"[..], &flags.to_be_bytes()].concat();
    let size = [SIZE, SIZE + 700, 0x7fff_ffff_ffff_e000, 4096][usize::from(export_kind >> 2 & 3)];
    let of_export = 1 | [0x6c, 0x6c, 0x16c, 0x2, 0x4, 0x28, 0x0, 0x10][usize::from(export_kind >> 4 & 7)];
    let of_export: u16 = of_export;
    let export = [&size.to_be_bytes()[..], &of_export.to_be_bytes()].concat();
    if flags & 1 != 0 {
        let yes = |option| option_reply(option, 1, &[]);
        let no = |option| option_reply(option, (1 << 31) + 1, b"not here");
        bytes.extend(if has(1) { yes(option::STRUCTURED_REPLY) } else { no(option::STRUCTURED_REPLY) });
        if has(1) && has(2) {
            let context = [&CONTEXT.to_be_bytes()[..], b"base:allocation"].concat();
            bytes.extend(option_reply(option::SET_META_CONTEXT, 4, &context));
            bytes.extend(yes(option::SET_META_CONTEXT));
        } else if has(1) {
            bytes.extend(no(option::SET_META_CONTEXT));
        }
        if !has(4) {
            let info = |kind: u16, data: &[u8]| {
                option_reply(option::GO, 3, &[&kind.to_be_bytes()[..], data].concat())
            };
            bytes.extend(info(0, &export));
            let blocks =
                [None, Some([1, 4096, 32 << 20]), Some([512, 512, 64 << 10]), Some([4096, 4096, u32::MAX])];
            if let Some(blocks) = blocks[usize::from(export_kind & 3)] {
                bytes.extend(info(3, blocks.map(u32::to_be_bytes).as_flattened()));
            }
            return [bytes, yes(option::GO)].concat();
        }
        bytes.extend(no(option::GO));
    }
    bytes.extend(export);
    if flags & 3 != 3 {
        bytes.extend([0; 124]);
    }
    bytes
}

/// Returns the server's side of a handshake with the same export, for the sound server that follows.
pub fn sound_handshake(facts: &Facts) -> Vec<u8> {
    let mut bytes = [&b"NBDMAGICIHAVEOPT"[..], &3_u16.to_be_bytes()].concat();
    bytes.extend(option_reply(option::STRUCTURED_REPLY, 1, &[]));
    let context = [&CONTEXT.to_be_bytes()[..], b"base:allocation"].concat();
    bytes.extend(option_reply(option::SET_META_CONTEXT, 4, &context));
    bytes.extend(option_reply(option::SET_META_CONTEXT, 1, &[]));
    let export = [&[0, 0][..], &facts.size.to_be_bytes(), &facts.flags.to_be_bytes()].concat();
    bytes.extend(option_reply(option::GO, 3, &export));
    let blocks = [facts.minimum, facts.minimum.max(4096), facts.maximum].map(u32::to_be_bytes);
    bytes.extend(option_reply(option::GO, 3, &[&[0, 3][..], blocks.as_flattened()].concat()));
    bytes.extend(option_reply(option::GO, 1, &[]));
    bytes
}

fn change(bytes: &mut Vec<u8>, [at, how, value, more]: [u8; 4]) {
    let at = usize::from(at) % bytes.len();
    let len = (usize::from(more % 32) + 1).min(bytes.len() - at);
    match how % 8 {
        0 => bytes[at] ^= 1 << (value % 8),
        1 => bytes[at] = value,
        2 => bytes.truncate(at.max(1)),
        3 => drop(bytes.splice(at..at, std::iter::repeat_n(value, len))),
        4 => drop(bytes.drain(at..at + len - usize::from(len == bytes.len()))),
        5 => bytes[at..at + len].fill(value),
        6 => {
            // Repeat a part of the handshake of about the length of a reply.
            let end = bytes.len().min(at + 20 + usize::from(value));
            let part = bytes[at..end].to_vec();
            drop(bytes.splice(end..end, part));
        }
        _ => {
            let end = bytes.len().min(at + 4);
            let number = EDGES[usize::from(value) % EDGES.len()] as u32;
            bytes[at..end].copy_from_slice(&number.to_be_bytes()[..end - at]);
        }
    }
}

/// Numbers near limits of the protocol and of the disk.
const EDGES: [u64; 16] = [
    0,
    1,
    8,
    12,
    511,
    512,
    4096,
    PART,
    65_536 + 13,
    SIZE,
    128 << 20,
    i32::MAX as u64,
    u32::MAX as u64 - 7,
    u32::MAX as u64,
    i64::MAX as u64,
    u64::MAX,
];
const ERRNOS: [u32; 10] = [0, 1, 5, 12, 22, 28, 75, 95, 108, u32::MAX];

impl Script {
    /// Generates the script of an input. Returns None if the input is too short.
    pub fn new(input: &[u8]) -> Option<Self> {
        let (&[modes, export_kind, counts], mut rest) = input.split_first_chunk()?;
        let mut handshake = handshake(modes, export_kind);
        for _ in 0..counts & 3 {
            let (how, left) = rest.split_first_chunk()?;
            change(&mut handshake, *how);
            rest = left;
        }
        let facts = facts::read(&handshake);
        let mut requests = Vec::new();
        for number in 0..counts >> 2 & 7 {
            let (&[kind, shape], left) = rest.split_first_chunk()?;
            rest = left;
            if let Some(facts) = facts.as_ref().filter(|facts| is_usable(facts, &handshake)) {
                requests.push(request(facts, u64::from(number), kind, shape, &requests));
            }
        }
        let replies = rest.as_chunks().0.iter().take(REPLIES_MAX).copied().collect();
        Some(Self { handshake, facts, requests, replies, is_followed: modes >> 5 & 3 == 3 })
    }

    /// Asserts that the device has the properties that the server reported.
    pub fn assert_geometry(&self, geometry: &Geometry) {
        let facts = self.facts.as_ref().expect("there is a device");
        let block = u64::from(facts.block());
        assert_eq!(geometry.size, facts.size.next_multiple_of(block));
        assert_eq!(u64::from(geometry.padding), geometry.size - facts.size);
        assert_eq!(u64::from(geometry.logical_block), block);
        assert_eq!(geometry.read_only, facts.has(TransmissionFlags::READ_ONLY));
        assert_eq!(geometry.volatile_cache, facts.has(TransmissionFlags::SEND_FLUSH));
        assert!(geometry.io_min.is_power_of_two() && geometry.io_min >= geometry.logical_block);
    }

    /// Returns true if a sound server follows, to which the client sends open requests again. An open block
    /// status request requires a sound server, because the request could not end otherwise.
    pub fn recovers(&self, answers: &[Answer]) -> bool {
        let mut open = self.requests.iter().zip(answers).filter(|(_, answer)| **answer == Answer::None);
        let is_open = open.clone().next().is_some();
        is_open && (self.is_followed || open.any(|(request, _)| request.command == command::BLOCK_STATUS))
    }

    /// Returns the server's replies to requests with these cookies.
    pub fn replies(&self, requests: &[(SentRequest, u64)]) -> Vec<u8> {
        let structured = self.facts.as_ref().is_some_and(|facts| facts.structured);
        let mut bytes = Vec::new();
        for (number, reply) in (0..).zip(&self.replies) {
            add(&mut bytes, number, *reply, requests, structured);
        }
        bytes
    }
}

/// Returns true if the disk has room for all requests, and the client splits none of them.
fn is_usable(facts: &Facts, handshake: &[u8]) -> bool {
    facts.len == handshake.len() && facts.size >= 8 * PART && facts.maximum >= 16 << 10
}

fn request(facts: &Facts, number: u64, kind: u8, shape: u8, before: &[SentRequest]) -> SentRequest {
    let blocks = u32::from(shape & 3) + 1;
    let (mut offset, mut len) = (number * PART + u64::from(shape >> 2 & 7) * 4096, blocks * 4096);
    let has = |flag| facts.has(flag);
    let is_first = |command| !before.iter().any(|request| request.command == command);
    let writable = !has(TransmissionFlags::READ_ONLY);
    let command = match kind % 8 {
        1 if writable => command::WRITE,
        2 if has(TransmissionFlags::SEND_FLUSH) && is_first(command::FLUSH) => command::FLUSH,
        3 if writable && has(TransmissionFlags::SEND_TRIM) => command::TRIM,
        4 if writable && has(TransmissionFlags::SEND_WRITE_ZEROES) => command::WRITE_ZEROES,
        5 | 6 if facts.context.is_some() && is_first(command::BLOCK_STATUS) => command::BLOCK_STATUS,
        _ => command::READ,
    };
    if command == command::FLUSH {
        (offset, len) = (0, 0);
    }
    SentRequest { command, offset, len, block: facts.block() }
}

fn chunk(cookie: u64, kind: u16, flags: u16, payload: &[&[u8]]) -> Vec<u8> {
    let payload = payload.concat();
    chunk_of(cookie, kind, flags, payload.len() as u32, &payload)
}

fn chunk_of(cookie: u64, kind: u16, flags: u16, len: u32, payload: &[u8]) -> Vec<u8> {
    let head = [flags, kind].map(u16::to_be_bytes);
    let magic = 0x668e_33ef_u32.to_be_bytes();
    [&magic[..], head.as_flattened(), &cookie.to_be_bytes(), &len.to_be_bytes(), payload].concat()
}

fn simple(cookie: u64, errno: u32, data: &[u8]) -> Vec<u8> {
    [&0x6744_6698_u32.to_be_bytes()[..], &errno.to_be_bytes(), &cookie.to_be_bytes(), data].concat()
}

/// Returns generated data of `len` bytes, different for each reply.
fn data(number: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (number * 67 + at / 512 * 5 + at % 249 + 1) as u8).collect()
}

/// Adds a reply, or a chunk of a structured reply, to `bytes`.
fn add(
    bytes: &mut Vec<u8>,
    number: u64,
    [kind_and_request, a, b, c]: [u8; 4],
    requests: &[(SentRequest, u64)],
    structured: bool,
) {
    let which = usize::from(kind_and_request >> 4);
    let Some((of, cookie)) = requests.get(which % requests.len().max(1)) else { return };
    let cookie = if which == 15 { cookie.wrapping_add(EDGES[usize::from(a) % 16]) } else { *cookie };
    let is_read = of.command == command::READ;
    let len = if is_read { of.len as usize } else { 0 };
    let edge = |byte: u8| EDGES[usize::from(byte) % 16];
    let flags = u16::from(c & 1);
    let at = of.offset.wrapping_add(u64::from(a) * 512).wrapping_sub(u64::from(c >> 1 & 1) * 7);
    let span = usize::from(b) * 512 + usize::from(c >> 2 & 3);
    match kind_and_request & 15 {
        0 => {
            let more = [0, 1, 512][usize::from(c) % 3];
            let len = if c & 0x80 == 0 { len + more } else { len.saturating_sub(more) };
            bytes.extend(simple(cookie, 0, &data(number, len)));
        }
        1 => bytes.extend(simple(cookie, ERRNOS[usize::from(a) % 10], &[])),
        2 => bytes.extend(chunk(cookie, 1, flags, &[&at.to_be_bytes(), &data(number, span)])),
        3 => bytes.extend(chunk(cookie, 2, flags, &[&at.to_be_bytes(), &(span as u32).to_be_bytes()])),
        4 => bytes.extend(chunk(cookie, 0, flags, &[&vec![0; usize::from(a & 3)]])),
        5 => {
            let context = if a == 0xff { 8 } else { CONTEXT };
            let rows = (0..usize::from(b % 16)).map(|row| {
                let kind = [0, 3, 2, 1][row.wrapping_mul(usize::from(a) + 1) % 4];
                let len = [512, 1024, 700, 4096, 100, 16_384, 0, u32::MAX][(row + usize::from(c >> 1)) % 8];
                [len, kind].map(u32::to_be_bytes)
            });
            let rows: Vec<_> = rows.flatten().collect();
            bytes.extend(chunk(cookie, 5, flags, &[&context.to_be_bytes(), rows.as_flattened()]));
        }
        6 | 7 => {
            let (text, is_placed) = (vec![b'e'; usize::from(b)], kind_and_request & 1 == 1);
            let text_len = u16::from(b).wrapping_add(u16::from(c >> 1 & 1));
            let place: &[u8] = if is_placed { &[0; 8] } else { &[] };
            let errno = ERRNOS[usize::from(a) % 10].to_be_bytes();
            let kind = if is_placed { 0x8002 } else { 0x8001 };
            bytes.extend(chunk(cookie, kind, flags, &[&errno, &text_len.to_be_bytes(), &text, place]));
        }
        8 => {
            let kind = u16::from(a) << 8 | u16::from(b);
            bytes.extend(chunk(cookie, kind, flags, &[&data(number, usize::from(c >> 1))]));
        }
        9 => bytes.extend([a, b, c]),
        10 if !structured => bytes.extend(simple(cookie, 0, &data(number, len))),
        10 if is_read => {
            // Three chunks: the last one is sent first, and the middle one is a hole.
            let (first, second) = (len / 4 / 512 * 512, len / 2 / 512 * 512);
            let all = data(number, len);
            let place = |at: usize| (of.offset + at as u64).to_be_bytes();
            let hole = (second - first) as u32;
            bytes.extend(chunk(cookie, 1, 0, &[&place(second), &all[second..]]));
            bytes.extend(chunk(cookie, 2, 0, &[&place(first), &hole.to_be_bytes()]));
            bytes.extend(chunk(cookie, 1, 1, &[&place(0), &all[..first]]));
        }
        10 if of.command == command::BLOCK_STATUS => {
            let row = [CONTEXT, of.len, u32::from(a & 3)].map(u32::to_be_bytes);
            bytes.extend(chunk(cookie, 5, 1, &[row.as_flattened()]));
        }
        10 => bytes.extend(chunk(cookie, 0, 1, &[])),
        11 => {
            let last = bytes.len().checked_sub(usize::from(a) + 1);
            if let Some(byte) = last.and_then(|last| bytes.get_mut(last)) {
                *byte ^= c;
            }
        }
        12 => bytes.truncate(bytes.len().saturating_sub(usize::from(a))),
        13 => {
            let payload = [&at.to_be_bytes()[..], &data(number, usize::from(c) * 64)].concat();
            bytes.extend(chunk_of(cookie, 1 << (a & 3) >> 1, flags, edge(b) as u32, &payload));
        }
        14 => {
            let payload = [&edge(a).to_be_bytes()[..], &(edge(b) as u32).to_be_bytes()].concat();
            bytes.extend(chunk(cookie, 1 + u16::from(c >> 1 & 1), flags, &[&payload]));
        }
        _ => {
            let end = chunk_of(cookie, 0x8000 | u16::from(b), flags, edge(a) as u32, &data(number, c.into()));
            bytes.extend(end);
        }
    }
}
