//! Generates a stream of NBD requests from an input.
//!
//! | bytes | content |
//! |---|---|
//! | 0 | structured replies or extended headers, the contexts, read-only, without FUA, zones, the client disconnects early |
//! | 1 | size of the device, its I/O mode, whether it has a bad block |
//! | 2 | seed of the order of completions |
//! | 0 and 1 | high bits: the connection has a thread of its own, as always outside of checks |
//! | then, for each request | tag: command (low 4 bits), kind of numbers (high 4 bits); flags; offset and length, 2 bytes each; identifiers of a block status with a payload, 1 byte |
//!
//! Offsets and lengths are mapped to numbers near limits. Some tags are not commands of the protocol: an
//! unknown command, arbitrary bytes, a truncated request. The stream ends with a flush.

use freestone_testkit::Manner;
use freestone_testkit::nbd::prelude::*;

use super::device::DeviceConfig;

/// Maximum number of bytes sent and requested in one session, so that the check of an input takes about a
/// millisecond.
const BUDGET_BYTES: u64 = 600 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload {
    None,
    /// Data as long as the range of the request.
    Data,
    /// Payload of a block status: the length of the range, the first `count` context IDs, and `extra` surplus
    /// bytes.
    Contexts {
        ids: [u32; 3],
        count: usize,
        extra: usize,
    },
}

#[derive(Debug, Clone, Copy)]
pub struct SentRequest {
    pub command: u16,
    pub flags: u16,
    pub offset: u64,
    /// Length of the range on the device, in bytes.
    pub len: u64,
    pub payload: Payload,
}

impl SentRequest {
    /// Fills `out` with the data that the request at `index` writes at offset `from`: another byte value in each
    /// block.
    pub fn payload(index: usize, from: u64, out: &mut [u8]) {
        for (block, out) in (from / 512..).zip(out.chunks_mut(512)) {
            out.fill((index as u64 * 89 + 1 + block * 31) as u8);
        }
    }

    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    fn payload_bytes(&self) -> u64 {
        match self.payload {
            Payload::None => 0,
            Payload::Data => self.len,
            Payload::Contexts { count, extra, .. } => 8 + 4 * count as u64 + extra as u64,
        }
    }

    /// Returns the length of the request on the wire, with header and payload, in bytes.
    pub fn wire_bytes(&self, headers: Headers) -> usize {
        headers.request_bytes() + self.payload_bytes() as usize
    }
}

/// Session of a client that is generated from an input.
#[allow(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
#[derive(Debug)]
pub struct Script {
    pub headers: Headers,
    pub contexts: Vec<&'static str>,
    pub read_only: bool,
    pub without_fua: bool,
    pub leaves: bool,
    /// True if the server uses a thread of its own for the connection.
    pub own_thread: bool,
    pub device: DeviceConfig,
    /// Complete requests of the session. The cookie of a request is its index.
    pub requests: Vec<SentRequest>,
    pub bytes: Vec<u8>,
}

impl Script {
    /// Generates the session of an input. Returns None if the input is too short.
    pub fn new(input: &[u8]) -> Option<Self> {
        let (&[modes, kind, seed], rest) = input.split_first_chunk()?;
        // The largest size is rare, because checks with it are slow.
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
            4 | 5 => Manner::Held,
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
        // A thread for the connection is rare, because it is slow to create.
        let own_thread = modes >> 6 == 3 && kind >> 6 == 3;
        let bad = (kind & 32 != 0).then_some(size / 2 + 100);
        let mut script = Self {
            headers,
            contexts,
            read_only: modes & 8 != 0,
            without_fua: modes & 16 != 0,
            leaves: own_thread && seed & 1 != 0,
            own_thread,
            device: DeviceConfig {
                size,
                manner: if own_thread { Manner::Held } else { manner },
                late: !own_thread,
                zoned: modes & 32 != 0,
                bad,
                seed: u64::from(seed),
                forgets: kind & 64 != 0,
                flushes: 0,
            },
            requests: Vec::new(),
            bytes: Vec::new(),
        };
        script.fill(rest);
        let flags = u16::from(!script.without_fua);
        let good = |request: &&SentRequest| {
            request.command == FLUSH && (request.offset, request.len) == (0, 0) && request.flags & !flags == 0
        };
        script.device.flushes = script.requests.iter().filter(good).count();
        Some(script)
    }

    /// Returns the maximum total length of the replies in bytes.
    pub fn max_reply_bytes(&self) -> usize {
        let most = |request: &SentRequest| match request.command {
            READ if request.end() <= self.device.size => {
                request.len as usize + request.len as usize / 4096 * 40 + 200
            }
            BLOCK_STATUS if request.end() <= self.device.size => {
                2 * (40 + (request.len as usize / 512 + 2).min(8192) * 16)
            }
            _ => 200,
        };
        self.requests.iter().map(most).sum()
    }

    /// Returns the maximum number of messages in which the server sends the replies.
    pub fn max_reply_messages(&self) -> usize {
        let tries = match self.device.manner {
            Manner::Partly(most) | Manner::Mixed(most) => {
                let tries = |request: &SentRequest| (request.len / most) as usize + 4;
                self.requests.iter().filter(|request| request.end() <= self.device.size).map(tries).sum()
            }
            _ => self.requests.len(),
        };
        tries + 64
    }

    /// Adds the requests that `rest` of the input encodes.
    fn fill(&mut self, mut rest: &[u8]) {
        let mut requested_bytes = 0_u64;
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
                    // Arbitrary bytes, after which the server most likely ends the session.
                    let n = usize::from(flags).min(rest.len());
                    if n == 0 {
                        continue;
                    }
                    self.flush();
                    // The first byte of a request never has the highest bit set, so these bytes are not a
                    // request.
                    self.bytes.push(rest[0] | 0x80);
                    self.bytes.extend_from_slice(&rest[1..n]);
                    return;
                }
                10 => {
                    self.flush();
                    let header = headers.request(flags.into(), READ, 0, offset, len);
                    self.bytes.extend_from_slice(&header[..usize::from(flags) % header.len()]);
                    return;
                }
                11.. => command = [READ, WRITE, WRITE, TRIM, BLOCK_STATUS][usize::from(command - 11)],
                _ => {}
            }
            let flags = if flags & 0x80 == 0 { u16::from(flags & 0x3f) } else { u16::from(flags) << 8 };
            // Commands selected by tags above 10 are valid, and have no flag but FUA.
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
                // A write has data with and without the flag `PAYLOAD_LEN`.
                (_, WRITE) => Payload::Data,
                (Headers::Extended, _) if flags & PAYLOAD_LEN != 0 => Payload::Data,
                _ => Payload::None,
            };
            let request = SentRequest { command, flags, offset, len, payload };
            let room = BUDGET_BYTES.saturating_sub(self.bytes.len() as u64);
            let sent = request.payload_bytes().min(room);
            let is_cut = sent < request.payload_bytes();
            if command == DISC || is_cut {
                self.flush();
            }
            let index = self.requests.len();
            let wire_len = if payload == Payload::None { len } else { request.payload_bytes() };
            self.bytes.extend(headers.request(flags, command, index as u64, offset, wire_len));
            let from = self.bytes.len();
            if let Payload::Contexts { ids, count, .. } = payload {
                self.bytes.extend(len.to_be_bytes());
                self.bytes.extend(ids[..count].iter().flat_map(|id| id.to_be_bytes()));
                self.bytes.resize(from + request.payload_bytes() as usize, 0);
                self.bytes.truncate(from + sent as usize);
            } else {
                self.bytes.resize(from + sent as usize, 0);
                SentRequest::payload(index, offset, &mut self.bytes[from..]);
            }
            if is_cut {
                return;
            }
            match command {
                READ => requested_bytes = requested_bytes.saturating_add(len),
                BLOCK_STATUS => requested_bytes = requested_bytes.saturating_add(len / 32),
                _ => {}
            }
            self.requests.push(request);
            if command == DISC {
                return;
            }
            if requested_bytes > BUDGET_BYTES || self.bytes.len() as u64 > BUDGET_BYTES {
                break;
            }
        }
        self.flush();
    }

    /// Adds a flush before the end of the session, at which the device completes all held requests.
    fn flush(&mut self) {
        self.bytes.extend(self.headers.request(0, FLUSH, self.requests.len() as u64, 0, 0));
        self.requests.push(SentRequest {
            command: FLUSH,
            flags: 0,
            offset: 0,
            len: 0,
            payload: Payload::None,
        });
    }

    fn offset(&self, which: u8, number: u64) -> u64 {
        match which {
            0 => number * 512 % self.device.size,
            1 => self.device.size.wrapping_sub(number),
            2 => number,
            _ => number << 48 | number,
        }
    }

    fn len(&self, which: u8, number: u32) -> u64 {
        let len = match which {
            0 => number % 1024 * 512,
            1 => number,
            2 => (32 << 20) + 32768 - number,
            _ if number & 1 == 0 => self.device.size as u32 - (number >> 1) * 512 % self.device.size as u32,
            _ if self.headers == Headers::Extended && number & 2 != 0 => {
                return u64::from(number) << 48 | u64::from(number >> 2);
            }
            _ => u32::MAX - (number >> 1),
        };
        len.into()
    }
}
