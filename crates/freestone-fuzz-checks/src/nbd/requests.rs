//! From an input to a stream of requests.
//!
//! | bytes | what |
//! |---|---|
//! | 0 | structured replies or extended headers, the contexts, read-only, without FUA, zones, the client leaves early |
//! | 1 | size of the device, its manner, whether it has a bad block |
//! | 2 | seed of the order of answers |
//! | 0 and 1 | high bits: the connection has a thread of its own, as always outside of checks |
//! | then, for each request | tag: command (low 4 bits), which numbers (high 4 bits); flags; offset and length, 2 bytes each; of a block status with a payload its identifiers, 1 byte |
//!
//! Offsets and lengths stand for numbers near the edges where mistakes are made. Tags have a few
//! uses beside the protocol's commands: an unknown command, bytes as they are, a request that is
//! cut off. Before the end there is a flush.

use super::device::{Manner, Shape};

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;

pub const PAYLOAD_LEN: u16 = 32;

/// Most bytes that are sent, and that are asked for, in one session: so an input takes a
/// millisecond.
const BUDGET_BYTES: u64 = 600 << 10;

/// What was agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Headers {
    Simple,
    Structured,
    Extended,
}

impl Headers {
    /// Length of a request's header.
    const fn bytes(self) -> usize {
        match self {
            Self::Simple | Self::Structured => 28,
            Self::Extended => 32,
        }
    }
}

/// What follows a request's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload {
    None,
    /// As many bytes as the header says.
    Data,
    /// A range, the first of these identifiers, and bytes that are too many.
    Contexts {
        ids: [u32; 3],
        count: usize,
        extra: usize,
    },
}

/// A request that the server gets as a whole.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    pub command: u16,
    pub flags: u16,
    pub offset: u64,
    /// Of the range.
    pub len: u64,
    pub payload: Payload,
}

impl Asked {
    /// What the request at `index` writes from a byte of the device on: another byte in every
    /// block.
    pub fn payload(index: usize, from: u64, out: &mut [u8]) {
        for (block, out) in (from / 512..).zip(out.chunks_mut(512)) {
            out.fill((index as u64 * 89 + 1 + block * 31) as u8);
        }
    }

    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// Bytes of its payload.
    fn payload_bytes(&self) -> u64 {
        match self.payload {
            Payload::None => 0,
            Payload::Data => self.len,
            Payload::Contexts { count, extra, .. } => 8 + 4 * count as u64 + extra as u64,
        }
    }

    /// Bytes of the request and its payload.
    pub fn wire_bytes(&self, headers: Headers) -> usize {
        headers.bytes() + self.payload_bytes() as usize
    }
}

/// What a client does in its session.
#[allow(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
#[derive(Debug)]
pub struct Script {
    pub headers: Headers,
    pub contexts: Vec<&'static str>,
    pub read_only: bool,
    pub without_fua: bool,
    pub leaves: bool,
    /// The server has a thread for the connection.
    pub alone: bool,
    pub shape: Shape,
    /// The cookie of each is its index.
    pub asked: Vec<Asked>,
    pub bytes: Vec<u8>,
}

impl Script {
    /// `None`: the input is too short.
    pub fn new(input: &[u8]) -> Option<Self> {
        let (&[modes, kind, seed], rest) = input.split_first_chunk()?;
        // The last is rare: it is slow.
        let size = match kind & 3 {
            0 => 9 * 512,
            1 => 64 << 10,
            2 => 300 << 10,
            _ if modes >> 6 == 2 => 40 << 20,
            _ => 580 << 10,
        };
        let manner = match kind >> 2 & 7 {
            0 | 1 => Manner::Inline,
            2 => Manner::Partly(1536),
            3 => Manner::Partly(20 << 10),
            4 | 5 => Manner::Late,
            6 => Manner::Mixed(u64::MAX),
            _ => Manner::Mixed(1024),
        };
        let (headers, contexts): (_, &[_]) = match modes & 7 {
            0 => (Headers::Simple, &[]),
            1 => (Headers::Structured, &[]),
            3 => (Headers::Structured, &["base:allocation"]),
            5 => (Headers::Structured, &["freestone:changed"]),
            7 => (Headers::Structured, &["base:allocation", "freestone:changed"]),
            2 => (Headers::Extended, &[]),
            4 => (Headers::Extended, &["freestone:changed"]),
            _ => (Headers::Extended, &["base:allocation", "freestone:changed"]),
        };
        let contexts = contexts.to_vec();
        // Rare: it takes a thread.
        let alone = modes >> 6 == 3 && kind >> 6 == 3;
        let bad = (kind & 32 != 0).then_some(size / 2 + 100);
        let mut script = Self {
            headers,
            contexts,
            read_only: modes & 8 != 0,
            without_fua: modes & 16 != 0,
            leaves: alone && seed & 1 != 0,
            alone,
            shape: Shape {
                size,
                manner: if alone { Manner::Held } else { manner },
                zoned: modes & 32 != 0,
                bad,
                seed: u64::from(seed),
                forgets: kind & 64 != 0,
                flushes: 0,
            },
            asked: Vec::new(),
            bytes: Vec::new(),
        };
        script.fill(rest);
        let flags = u16::from(!script.without_fua);
        let good = |asked: &&Asked| {
            asked.command == FLUSH && (asked.offset, asked.len) == (0, 0) && asked.flags & !flags == 0
        };
        script.shape.flushes = script.asked.iter().filter(good).count();
        Some(script)
    }

    /// Most bytes of the answers.
    pub fn most_heard(&self) -> usize {
        let most = |asked: &Asked| match asked.command {
            READ if asked.end() <= self.shape.size => {
                asked.len as usize + asked.len as usize / 4096 * 40 + 200
            }
            BLOCK_STATUS if asked.end() <= self.shape.size => {
                2 * (40 + (asked.len as usize / 512 + 2).min(8192) * 16)
            }
            _ => 200,
        };
        self.asked.iter().map(most).sum()
    }

    /// Most messages in which they come.
    pub fn most_messages(&self) -> usize {
        let tries = match self.shape.manner {
            Manner::Partly(most) | Manner::Mixed(most) => {
                let tries = |asked: &Asked| (asked.len / most) as usize + 4;
                self.asked.iter().filter(|asked| asked.end() <= self.shape.size).map(tries).sum()
            }
            _ => self.asked.len(),
        };
        tries + 64
    }

    fn fill(&mut self, mut rest: &[u8]) {
        let mut asked_for = 0_u64;
        let headers = self.headers;
        while let Some((&[tag, flags, o0, o1, l0, l1], more)) = rest.split_first_chunk() {
            rest = more;
            let (o, l) = (u16::from_le_bytes([o0, o1]), u16::from_le_bytes([l0, l1]));
            let offset = self.offset(tag >> 4 & 3, u64::from(o));
            let len = self.len(tag >> 6, u32::from(l));
            let mut command = u16::from(tag & 15);
            match command {
                8 => command = l,
                9 => {
                    // As they are: most likely the end of the session.
                    let n = usize::from(flags).min(rest.len());
                    if n == 0 {
                        continue;
                    }
                    self.flush();
                    // No request begins so.
                    self.bytes.push(rest[0] | 0x80);
                    self.bytes.extend_from_slice(&rest[1..n]);
                    return;
                }
                10 => {
                    self.flush();
                    let header = header(headers, flags.into(), READ, 0, offset, len);
                    self.bytes.extend_from_slice(&header[..usize::from(flags) % headers.bytes()]);
                    return;
                }
                11.. => command = [READ, WRITE, WRITE, TRIM, BLOCK_STATUS][usize::from(command - 11)],
                _ => {}
            }
            let flags = if flags & 0x80 == 0 { u16::from(flags & 0x3f) } else { u16::from(flags) << 8 };
            // Of a plain request the low flags are what it has most often: none.
            let flags = if tag & 15 > 10 { flags & 1 } else { flags };
            let (offset, len) = if command == FLUSH && tag >> 4 == 0 { (0, 0) } else { (offset, len) };
            let payload = match (headers, command) {
                (Headers::Extended, BLOCK_STATUS) if flags & PAYLOAD_LEN != 0 => {
                    let Some((&which, more)) = rest.split_first() else { break };
                    rest = more;
                    let ids = [[1, 2, 3], [2, 1, 1], [1, 1, 2], [0, 2, 1]][usize::from(which >> 2 & 3)];
                    Payload::Contexts {
                        ids,
                        count: usize::from(which & 3),
                        extra: usize::from(which >> 4 & 3),
                    }
                }
                (Headers::Extended, DISC) => Payload::None,
                // The data of a write is there with and without the flag.
                (_, WRITE) => Payload::Data,
                (Headers::Extended, _) if flags & PAYLOAD_LEN != 0 => Payload::Data,
                _ => Payload::None,
            };
            let asked = Asked { command, flags, offset, len, payload };
            let room = BUDGET_BYTES.saturating_sub(self.bytes.len() as u64);
            let sent = asked.payload_bytes().min(room);
            let is_cut = sent < asked.payload_bytes();
            if command == DISC || is_cut {
                self.flush();
            }
            let index = self.asked.len();
            let told = if payload == Payload::None { len } else { asked.payload_bytes() };
            self.bytes.extend(header(headers, flags, command, index as u64, offset, told));
            let from = self.bytes.len();
            if let Payload::Contexts { ids, count, .. } = payload {
                self.bytes.extend(len.to_be_bytes());
                self.bytes.extend(ids[..count].iter().flat_map(|id| id.to_be_bytes()));
                self.bytes.resize(from + asked.payload_bytes() as usize, 0);
                self.bytes.truncate(from + sent as usize);
            } else {
                self.bytes.resize(from + sent as usize, 0);
                Asked::payload(index, offset, &mut self.bytes[from..]);
            }
            if is_cut {
                return;
            }
            match command {
                READ => asked_for = asked_for.saturating_add(len),
                BLOCK_STATUS => asked_for = asked_for.saturating_add(len / 32),
                _ => {}
            }
            self.asked.push(asked);
            if command == DISC {
                return;
            }
            if asked_for > BUDGET_BYTES || self.bytes.len() as u64 > BUDGET_BYTES {
                break;
            }
        }
        self.flush();
    }

    /// A flush before the end, at which the device answers everything.
    fn flush(&mut self) {
        self.bytes.extend(header(self.headers, 0, FLUSH, self.asked.len() as u64, 0, 0));
        self.asked.push(Asked { command: FLUSH, flags: 0, offset: 0, len: 0, payload: Payload::None });
    }

    fn offset(&self, which: u8, number: u64) -> u64 {
        match which {
            0 => number * 512 % self.shape.size,
            1 => self.shape.size.wrapping_sub(number),
            2 => number,
            _ => number << 48 | number,
        }
    }

    fn len(&self, which: u8, number: u32) -> u64 {
        let len = match which {
            0 => number % 1024 * 512,
            1 => number,
            2 => (32 << 20) + 32768 - number,
            _ if number & 1 == 0 => self.shape.size as u32 - (number >> 1) * 512 % self.shape.size as u32,
            _ if self.headers == Headers::Extended && number & 2 != 0 => {
                return u64::from(number) << 48 | u64::from(number >> 2);
            }
            _ => u32::MAX - (number >> 1),
        };
        len.into()
    }
}

/// A request on the wire.
pub fn header(headers: Headers, flags: u16, command: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
    let extended = headers == Headers::Extended;
    let magic = if extended { 0x21e4_1c71_u32 } else { 0x2560_9513 };
    let mut bytes = magic.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    if extended {
        bytes.extend(len.to_be_bytes());
    } else {
        bytes.extend((len as u32).to_be_bytes());
    }
    bytes
}
