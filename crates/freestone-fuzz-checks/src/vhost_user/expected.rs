//! Expected content of the device, and expected completion of each request.

use freestone::device::zoned::{Zone, ZoneCondition, ZoneOp, ZoneType, Zoned};
use freestone::device::{Buffer, Device, Error, Flags, Op, Request};
use freestone_testkit::{Manner, ModelZoned};

use super::chain::{ParsedRequest, Piece, bytes, places, total};
use super::device::{DiskConfig, SIZE, zones};
use super::wire::{
    DISCARD, FLUSHES, GET_ID, IN, IOERR, OK, OUT, UNSUPP, WRITE_ZEROES, ZONE_ACTIVES, ZONE_APPEND,
    ZONE_CLOSE, ZONE_FINISH, ZONE_INVALID, ZONE_OPEN, ZONE_OPENS, ZONE_REPORT, ZONE_RESET, ZONE_RESET_ALL,
    ZONE_WP,
};

const BLOCK: u64 = 512;
/// Maximum length of the data of a request, in bytes.
const MAX_BYTES: u64 = 32 << 20;
/// Maximum number of sectors of a discard or write zeroes request.
const MAX_SECTORS: u32 = 1 << 30;

pub struct Expected {
    config: DiskConfig,
    read_only: bool,
    content: ExpectedContent,
}

enum ExpectedContent {
    Bytes {
        data: Vec<u8>,
        /// True for each block whose content is unknown, because a request failed and may have had an effect.
        unknown: Vec<bool>,
    },
    /// A second model of the zoned device, which executes the same requests.
    Zones(Box<ModelZoned>),
}

#[derive(Debug)]
pub struct ExpectedReply {
    /// Status bytes that are allowed.
    pub statuses: Vec<u8>,
    /// Expected data at the beginning of the driver's writable buffers after success. None allows any byte.
    pub data: Vec<Option<u8>>,
}

impl ExpectedReply {
    fn only(status: u8) -> Self {
        Self { statuses: vec![status], data: Vec::new() }
    }
}

/// Returns the status byte for a device error of a data request.
fn status(error: Error) -> u8 {
    match error {
        Error::Unsupported => UNSUPP,
        Error::ZoneWritePointer => ZONE_WP,
        Error::ZoneCondition | Error::ZoneBoundary => ZONE_INVALID,
        Error::ZoneTooManyOpen => ZONE_OPENS,
        Error::ZoneTooManyActive => ZONE_ACTIVES,
        _ => IOERR,
    }
}

/// Returns the status byte for a device error of a zone request.
fn zone_status(error: Error) -> u8 {
    match error {
        Error::Misaligned | Error::OutOfRange => ZONE_INVALID,
        error => status(error),
    }
}

impl Expected {
    /// Creates the expected state of a device whose content is all zeroes.
    pub fn new(config: DiskConfig, read_only: bool) -> Self {
        let content = if config.zoned {
            ExpectedContent::Zones(Box::new(zones()))
        } else {
            ExpectedContent::Bytes {
                data: vec![0; SIZE as usize],
                unknown: vec![false; (SIZE / BLOCK) as usize],
            }
        };
        Self { config, read_only, content }
    }

    /// Executes a request, and returns the expected completion. `done` is true if the request succeeded.
    pub fn follow(&mut self, parsed: &ParsedRequest, memory: &[u8], name: &str, done: bool) -> ExpectedReply {
        let offset = parsed.sector.checked_mul(512);
        let (given, wanted) = (total(&parsed.readable), total(&parsed.writable));
        match parsed.kind {
            IN => match request(Op::Read, offset, wanted) {
                Some(request) => self.read(&request, &parsed.writable, memory),
                None => ExpectedReply::only(IOERR),
            },
            OUT => match request(Op::Write, offset, given) {
                Some(request) if !self.read_only => self.write(&request, &parsed.readable, memory, done),
                _ => ExpectedReply::only(IOERR),
            },
            FLUSHES => self.or_dropped(ExpectedReply::only(OK)),
            GET_ID | ZONE_REPORT if wanted > MAX_BYTES => ExpectedReply::only(IOERR),
            GET_ID => {
                let mut id = [0; 20];
                id[..name.len()].copy_from_slice(name.as_bytes());
                let n = wanted.min(20) as usize;
                scattered(id[..n].iter().map(|byte| Some(*byte)).collect(), &parsed.writable, memory)
            }
            DISCARD | WRITE_ZEROES => self.range(parsed, memory, done),
            ZONE_APPEND => self.append(parsed, offset, memory),
            ZONE_REPORT => self.report(offset, wanted, &parsed.writable, memory),
            ZONE_OPEN => self.zone_op(ZoneOp::Open, offset),
            ZONE_CLOSE => self.zone_op(ZoneOp::Close, offset),
            ZONE_FINISH => self.zone_op(ZoneOp::Finish, offset),
            ZONE_RESET => self.zone_op(ZoneOp::Reset, offset),
            ZONE_RESET_ALL if self.read_only => ExpectedReply::only(IOERR),
            ZONE_RESET_ALL => match &self.content {
                ExpectedContent::Zones(zones) => {
                    ExpectedReply::only(zones.reset_all().map_or_else(zone_status, |()| OK))
                }
                ExpectedContent::Bytes { .. } => ExpectedReply::only(UNSUPP),
            },
            _ => ExpectedReply::only(UNSUPP),
        }
    }

    /// Asserts that the device has the expected content. Unknown blocks can have any content.
    pub fn compare(&mut self, content: &[u8]) {
        match &mut self.content {
            ExpectedContent::Bytes { data, unknown } => {
                for (block, unknown) in unknown.iter_mut().enumerate().filter(|(_, unknown)| **unknown) {
                    let block = block * BLOCK as usize..(block + 1) * BLOCK as usize;
                    data[block.clone()].copy_from_slice(&content[block]);
                    *unknown = false;
                }
                assert!(data == content, "the device holds other data");
            }
            ExpectedContent::Zones(zones) => {
                let mut data = vec![0; SIZE as usize];
                zones
                    .try_io(&Request::read(0, SIZE), Buffer::Read(&mut data))
                    .expect("a device without faults");
                assert!(data == content, "the device holds other data");
            }
        }
    }

    /// Returns the expected completion, in which an error is also allowed if the device may have dropped the
    /// request.
    fn or_dropped(&self, mut reply: ExpectedReply) -> ExpectedReply {
        if self.config.forgets && matches!(self.config.manner, Manner::Held | Manner::Mixed(_)) {
            reply.statuses.push(IOERR);
        }
        reply
    }

    fn is_bad(&self, request: &Request) -> bool {
        self.config.bad.is_some_and(|bad| (request.offset..request.offset + request.len).contains(&bad))
    }

    fn read(&self, request: &Request, pieces: &[Piece], memory: &[u8]) -> ExpectedReply {
        if request.offset > SIZE || request.len > SIZE - request.offset || self.is_bad(request) {
            return ExpectedReply::only(IOERR);
        }
        let range = request.offset as usize..(request.offset + request.len) as usize;
        let data = match &self.content {
            ExpectedContent::Bytes { data, unknown } => {
                let known = |at: usize| (!unknown[at / BLOCK as usize]).then_some(data[at]);
                range.map(known).collect()
            }
            ExpectedContent::Zones(zones) => {
                let mut data = vec![0; request.len as usize];
                if let Err(error) = zones.try_io(request, Buffer::Read(&mut data)) {
                    return ExpectedReply::only(status(error));
                }
                data.into_iter().map(Some).collect()
            }
        };
        self.or_dropped(scattered(data, pieces, memory))
    }

    fn write(&mut self, request: &Request, pieces: &[Piece], memory: &[u8], done: bool) -> ExpectedReply {
        let Some(data) = (request.len <= SIZE).then(|| bytes(memory, pieces, usize::MAX)).flatten() else {
            return ExpectedReply::only(IOERR);
        };
        let reply = self.change(request, Some(&data), done);
        self.or_dropped(reply)
    }

    /// Executes a write, discard or write zeroes request on the expected content.
    fn change(&mut self, request: &Request, from: Option<&[u8]>, done: bool) -> ExpectedReply {
        let inside = request.offset <= SIZE && request.len <= SIZE - request.offset;
        let bad = inside && self.is_bad(request);
        match &mut self.content {
            _ if !inside => ExpectedReply::only(IOERR),
            ExpectedContent::Zones(_) if bad => ExpectedReply::only(IOERR),
            ExpectedContent::Zones(zones) => {
                let tried = zones.try_io(request, from.map_or(Buffer::None, Buffer::Write));
                ExpectedReply::only(tried.map_or_else(status, |_| OK))
            }
            ExpectedContent::Bytes { data, unknown } => {
                let range = request.offset as usize..(request.offset + request.len) as usize;
                // A failed request may have had an effect, so the content of its blocks is unknown.
                unknown[range.start / BLOCK as usize..range.end / BLOCK as usize].fill(bad || !done);
                match from {
                    Some(from) => data[range].copy_from_slice(from),
                    None => data[range].fill(0),
                }
                ExpectedReply::only(if bad { IOERR } else { OK })
            }
        }
    }

    fn range(&mut self, parsed: &ParsedRequest, memory: &[u8], done: bool) -> ExpectedReply {
        if total(&parsed.readable) != 16 {
            return ExpectedReply::only(IOERR);
        }
        // The request fails if the buffer with the range of sectors is outside of the memory.
        let Some(raw) = bytes(memory, &parsed.readable, 16) else { return ExpectedReply::only(IOERR) };
        let number = |at: usize| u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let (sectors, flags) = (number(8), number(12));
        if flags > u32::from(parsed.kind == WRITE_ZEROES) {
            return ExpectedReply::only(UNSUPP);
        }
        let sector = u64::from(number(0)) | u64::from(number(4)) << 32;
        let op = if parsed.kind == DISCARD { Op::Discard } else { Op::WriteZeroes };
        match sector.checked_mul(512) {
            Some(offset) if !self.read_only && (1..=MAX_SECTORS).contains(&sectors) => {
                let flags = if flags == 1 { Flags::MAY_FREE } else { Flags::empty() };
                let request = Request::new(op, offset, u64::from(sectors) * 512).with(flags);
                let reply = self.change(&request, None, done);
                self.or_dropped(reply)
            }
            _ => ExpectedReply::only(IOERR),
        }
    }

    fn append(&mut self, parsed: &ParsedRequest, offset: Option<u64>, memory: &[u8]) -> ExpectedReply {
        let wanted = request(Op::Write, offset, total(&parsed.readable));
        let Some(request) = wanted.filter(|_| total(&parsed.writable) == 8 && !self.read_only) else {
            return ExpectedReply::only(IOERR);
        };
        let Some(data) = bytes(memory, &parsed.readable, usize::MAX) else {
            return ExpectedReply::only(IOERR);
        };
        let ExpectedContent::Zones(zones) = &self.content else { return ExpectedReply::only(UNSUPP) };
        match zones.try_append(request.offset, &data, Flags::empty()) {
            Ok(at) => {
                let sector = at.expect("it never blocks") / 512;
                scattered(sector.to_le_bytes().map(Some).to_vec(), &parsed.writable, memory)
            }
            Err(error) => ExpectedReply::only(zone_status(error)),
        }
    }

    fn zone_op(&self, op: ZoneOp, offset: Option<u64>) -> ExpectedReply {
        ExpectedReply::only(match (offset, &self.content) {
            (None, _) => ZONE_INVALID,
            _ if self.read_only => IOERR,
            (Some(offset), ExpectedContent::Zones(zones)) => {
                zones.zone_op(op, offset).map_or_else(zone_status, |()| OK)
            }
            (Some(_), ExpectedContent::Bytes { .. }) => UNSUPP,
        })
    }

    fn report(&self, offset: Option<u64>, room: u64, pieces: &[Piece], memory: &[u8]) -> ExpectedReply {
        let Some(offset) = offset else { return ExpectedReply::only(ZONE_INVALID) };
        let ExpectedContent::Zones(zones) = &self.content else { return ExpectedReply::only(UNSUPP) };
        let Some(most) = room.checked_sub(64).map(|room| room / 64) else {
            return ExpectedReply::only(ZONE_INVALID);
        };
        let (mut rows, mut count) = (Vec::new(), 0_u64);
        if most > 0 {
            let all = zones.report(offset, &mut |zone| {
                rows.extend(row(&zone));
                count += 1;
                count < most
            });
            if let Err(error) = all {
                return ExpectedReply::only(zone_status(error));
            }
        }
        let report = [&count.to_le_bytes()[..], &[0; 56], &rows].concat();
        scattered(report.into_iter().map(Some).collect(), pieces, memory)
    }
}

/// Returns a request for whole sectors, or None if the offset or the length is invalid.
fn request(op: Op, offset: Option<u64>, len: u64) -> Option<Request> {
    let possible = len > 0 && len.is_multiple_of(512) && len <= MAX_BYTES;
    Some(Request::new(op, offset?, len)).filter(|_| possible)
}

/// Returns the completion with success and `data`, or with an error if the driver's buffers are outside of
/// the memory.
fn scattered(data: Vec<Option<u8>>, pieces: &[Piece], memory: &[u8]) -> ExpectedReply {
    match places(memory, pieces, data.len()) {
        Some(_) => ExpectedReply { statuses: vec![OK], data },
        None => ExpectedReply::only(IOERR),
    }
}

/// Returns the encoded entry of a zone in a zone report.
fn row(zone: &Zone) -> Vec<u8> {
    let kind = match zone.kind {
        ZoneType::Conventional => 1,
        ZoneType::SequentialRequired => 2,
    };
    let state = match zone.condition {
        ZoneCondition::NotWritePointer => 0,
        ZoneCondition::Empty => 1,
        ZoneCondition::ImplicitOpen => 2,
        ZoneCondition::ExplicitOpen => 3,
        ZoneCondition::Closed => 4,
        ZoneCondition::ReadOnly => 13,
        ZoneCondition::Full => 14,
        ZoneCondition::Offline => 15,
    };
    let numbers = [zone.capacity / 512, zone.start / 512, zone.write_pointer / 512];
    let numbers: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    [&numbers[..], &[kind, state], &[0; 38]].concat()
}
