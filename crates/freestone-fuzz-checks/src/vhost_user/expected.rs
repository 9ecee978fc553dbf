//! What a device holds, known without having asked it; and what a request must be answered.

use freestone::device::zoned::{Zone, ZoneCondition, ZoneOp, ZoneType, Zoned};
use freestone::device::{Buffer, Device, Error, Flags, Op, Request};
use freestone_testkit::ModelZoned;

use super::device::{Manner, SIZE, Shape, zones};
use super::plain::{Asked, Piece, bytes, places, total};
use super::wire::{
    DISCARD, FLUSHES, GET_ID, IN, IOERR, OK, OUT, UNSUPP, WRITE_ZEROES, ZONE_ACTIVES, ZONE_APPEND,
    ZONE_CLOSE, ZONE_FINISH, ZONE_INVALID, ZONE_OPEN, ZONE_OPENS, ZONE_REPORT, ZONE_RESET, ZONE_RESET_ALL,
    ZONE_WP,
};

const BLOCK: u64 = 512;
/// Data of a request, and sectors of a range.
const MAX_BYTES: u64 = 32 << 20;
const MAX_SECTORS: u32 = 1 << 30;

/// What it holds.
pub struct Expected {
    shape: Shape,
    read_only: bool,
    held: Held,
}

enum Held {
    Bytes {
        data: Vec<u8>,
        /// Of each block; a request for it failed, and may have done a part of it.
        unknown: Vec<bool>,
    },
    /// Another device of the same kind, which is asked the same.
    Zones(Box<ModelZoned>),
}

/// What a request must be answered.
#[derive(Debug)]
pub struct Told {
    /// One of these.
    pub statuses: Vec<u8>,
    /// If it is done, what is at the beginning of what the driver gave for it; `None` is any byte.
    pub data: Vec<Option<u8>>,
}

impl Told {
    fn only(status: u8) -> Self {
        Self { statuses: vec![status], data: Vec::new() }
    }
}

/// The status of an error, of a request for bytes.
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

/// The same, of one for zones.
fn zone_status(error: Error) -> u8 {
    match error {
        Error::Misaligned | Error::OutOfRange => ZONE_INVALID,
        error => status(error),
    }
}

impl Expected {
    /// Of zeroes.
    pub fn new(shape: Shape, read_only: bool) -> Self {
        let held = if shape.zoned {
            Held::Zones(Box::new(zones()))
        } else {
            Held::Bytes { data: vec![0; SIZE as usize], unknown: vec![false; (SIZE / BLOCK) as usize] }
        };
        Self { shape, read_only, held }
    }

    /// Follows a request, of which the status is known: what it must have been, and done.
    pub fn follow(&mut self, asked: &Asked, memory: &[u8], name: &str, done: bool) -> Told {
        let offset = asked.sector.checked_mul(512);
        let (given, wanted) = (total(&asked.readable), total(&asked.writable));
        match asked.kind {
            IN => match request(Op::Read, offset, wanted) {
                Some(request) => self.read(&request, &asked.writable, memory),
                None => Told::only(IOERR),
            },
            OUT => match request(Op::Write, offset, given) {
                Some(request) if !self.read_only => self.write(&request, &asked.readable, memory, done),
                _ => Told::only(IOERR),
            },
            FLUSHES => self.or_forgotten(Told::only(OK)),
            GET_ID | ZONE_REPORT if wanted > MAX_BYTES => Told::only(IOERR),
            GET_ID => {
                let mut id = [0; 20];
                id[..name.len()].copy_from_slice(name.as_bytes());
                let n = wanted.min(20) as usize;
                scattered(id[..n].iter().map(|byte| Some(*byte)).collect(), &asked.writable, memory)
            }
            DISCARD | WRITE_ZEROES => self.range(asked, memory, done),
            ZONE_APPEND => self.append(asked, offset, memory),
            ZONE_REPORT => self.report(offset, wanted, &asked.writable, memory),
            ZONE_OPEN => self.zone_op(ZoneOp::Open, offset),
            ZONE_CLOSE => self.zone_op(ZoneOp::Close, offset),
            ZONE_FINISH => self.zone_op(ZoneOp::Finish, offset),
            ZONE_RESET => self.zone_op(ZoneOp::Reset, offset),
            ZONE_RESET_ALL if self.read_only => Told::only(IOERR),
            ZONE_RESET_ALL => match &self.held {
                Held::Zones(zones) => Told::only(zones.reset_all().map_or_else(zone_status, |()| OK)),
                Held::Bytes { .. } => Told::only(UNSUPP),
            },
            _ => Told::only(UNSUPP),
        }
    }

    /// What is unknown is as `content` has it; all else must be.
    pub fn compare(&mut self, content: &[u8]) {
        match &mut self.held {
            Held::Bytes { data, unknown } => {
                for (block, unknown) in unknown.iter_mut().enumerate().filter(|(_, unknown)| **unknown) {
                    let block = block * BLOCK as usize..(block + 1) * BLOCK as usize;
                    data[block.clone()].copy_from_slice(&content[block]);
                    *unknown = false;
                }
                assert!(data == content, "the device holds other data");
            }
            Held::Zones(zones) => {
                let mut data = vec![0; SIZE as usize];
                zones
                    .try_io(&Request::read(0, SIZE), Buffer::Read(&mut data))
                    .expect("a device without faults");
                assert!(data == content, "the device holds other data");
            }
        }
    }

    /// The answer to what is submitted may be forgotten.
    fn or_forgotten(&self, mut told: Told) -> Told {
        if self.shape.forgets && matches!(self.shape.manner, Manner::Held | Manner::Mixed(_)) {
            told.statuses.push(IOERR);
        }
        told
    }

    fn is_bad(&self, request: &Request) -> bool {
        self.shape.bad.is_some_and(|bad| (request.offset..request.offset + request.len).contains(&bad))
    }

    fn read(&self, request: &Request, pieces: &[Piece], memory: &[u8]) -> Told {
        if request.offset > SIZE || request.len > SIZE - request.offset || self.is_bad(request) {
            return Told::only(IOERR);
        }
        let range = request.offset as usize..(request.offset + request.len) as usize;
        let data = match &self.held {
            Held::Bytes { data, unknown } => {
                let known = |at: usize| (!unknown[at / BLOCK as usize]).then_some(data[at]);
                range.map(known).collect()
            }
            Held::Zones(zones) => {
                let mut data = vec![0; request.len as usize];
                if let Err(error) = zones.try_io(request, Buffer::Read(&mut data)) {
                    return Told::only(status(error));
                }
                data.into_iter().map(Some).collect()
            }
        };
        self.or_forgotten(scattered(data, pieces, memory))
    }

    fn write(&mut self, request: &Request, pieces: &[Piece], memory: &[u8], done: bool) -> Told {
        let Some(data) = (request.len <= SIZE).then(|| bytes(memory, pieces, usize::MAX)).flatten() else {
            return Told::only(IOERR);
        };
        let told = self.change(request, Some(&data), done);
        self.or_forgotten(told)
    }

    /// A write, or one without data.
    fn change(&mut self, request: &Request, from: Option<&[u8]>, done: bool) -> Told {
        let inside = request.offset <= SIZE && request.len <= SIZE - request.offset;
        let bad = inside && self.is_bad(request);
        match &mut self.held {
            _ if !inside => Told::only(IOERR),
            Held::Zones(_) if bad => Told::only(IOERR),
            Held::Zones(zones) => {
                let tried = zones.try_io(request, from.map_or(Buffer::None, Buffer::Write));
                Told::only(tried.map_or_else(status, |_| OK))
            }
            Held::Bytes { data, unknown } => {
                let range = request.offset as usize..(request.offset + request.len) as usize;
                // A request that failed may have done a part.
                unknown[range.start / BLOCK as usize..range.end / BLOCK as usize].fill(bad || !done);
                match from {
                    Some(from) => data[range].copy_from_slice(from),
                    None => data[range].fill(0),
                }
                Told::only(if bad { IOERR } else { OK })
            }
        }
    }

    fn range(&mut self, asked: &Asked, memory: &[u8], done: bool) -> Told {
        if total(&asked.readable) != 16 {
            return Told::only(IOERR);
        }
        // Without it the queue has ended.
        let Some(raw) = bytes(memory, &asked.readable, 16) else { return Told::only(IOERR) };
        let number = |at: usize| u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let (sectors, flags) = (number(8), number(12));
        if flags > u32::from(asked.kind == WRITE_ZEROES) {
            return Told::only(UNSUPP);
        }
        let sector = u64::from(number(0)) | u64::from(number(4)) << 32;
        let op = if asked.kind == DISCARD { Op::Discard } else { Op::WriteZeroes };
        match sector.checked_mul(512) {
            Some(offset) if !self.read_only && (1..=MAX_SECTORS).contains(&sectors) => {
                let flags = if flags == 1 { Flags::MAY_FREE } else { Flags::empty() };
                let request = Request::new(op, offset, u64::from(sectors) * 512).with(flags);
                let told = self.change(&request, None, done);
                self.or_forgotten(told)
            }
            _ => Told::only(IOERR),
        }
    }

    fn append(&mut self, asked: &Asked, offset: Option<u64>, memory: &[u8]) -> Told {
        let wanted = request(Op::Write, offset, total(&asked.readable));
        let Some(request) = wanted.filter(|_| total(&asked.writable) == 8 && !self.read_only) else {
            return Told::only(IOERR);
        };
        let Some(data) = bytes(memory, &asked.readable, usize::MAX) else { return Told::only(IOERR) };
        let Held::Zones(zones) = &self.held else { return Told::only(UNSUPP) };
        match zones.try_append(request.offset, &data, Flags::empty()) {
            Ok(at) => {
                let sector = at.expect("it never blocks") / 512;
                scattered(sector.to_le_bytes().map(Some).to_vec(), &asked.writable, memory)
            }
            Err(error) => Told::only(zone_status(error)),
        }
    }

    fn zone_op(&self, op: ZoneOp, offset: Option<u64>) -> Told {
        Told::only(match (offset, &self.held) {
            (None, _) => ZONE_INVALID,
            _ if self.read_only => IOERR,
            (Some(offset), Held::Zones(zones)) => zones.zone_op(op, offset).map_or_else(zone_status, |()| OK),
            (Some(_), Held::Bytes { .. }) => UNSUPP,
        })
    }

    fn report(&self, offset: Option<u64>, room: u64, pieces: &[Piece], memory: &[u8]) -> Told {
        let Some(offset) = offset else { return Told::only(ZONE_INVALID) };
        let Held::Zones(zones) = &self.held else { return Told::only(UNSUPP) };
        let Some(most) = room.checked_sub(64).map(|room| room / 64) else { return Told::only(ZONE_INVALID) };
        let (mut rows, mut count) = (Vec::new(), 0_u64);
        if most > 0 {
            let all = zones.report(offset, &mut |zone| {
                rows.extend(row(&zone));
                count += 1;
                count < most
            });
            if let Err(error) = all {
                return Told::only(zone_status(error));
            }
        }
        let said = [&count.to_le_bytes()[..], &[0; 56], &rows].concat();
        scattered(said.into_iter().map(Some).collect(), pieces, memory)
    }
}

/// A request for whole sectors; `None`: there is none such.
fn request(op: Op, offset: Option<u64>, len: u64) -> Option<Request> {
    let possible = len > 0 && len.is_multiple_of(512) && len <= MAX_BYTES;
    Some(Request::new(op, offset?, len)).filter(|_| possible)
}

/// Done, with this data, if there is a place for it.
fn scattered(data: Vec<Option<u8>>, pieces: &[Piece], memory: &[u8]) -> Told {
    match places(memory, pieces, data.len()) {
        Some(_) => Told { statuses: vec![OK], data },
        None => Told::only(IOERR),
    }
}

/// A zone as a driver sees it.
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
