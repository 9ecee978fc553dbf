//! One request, as it was copied out of the frontend's memory.

use freestone_core::device::zoned::{ZoneOp, ZoneRequest};
use freestone_core::device::{Error, Failed, Flags, IoBuf, Op, Request};
use zerocopy::{FromBytes as _, transmute};

use crate::disk::{MAX_RANGE_SECTORS, MAX_REQUEST_BYTES};
use crate::memory::{Memory, Unmapped};
use crate::ring::{Broken, Chain, Segment};
use crate::wire::{BlkHeader, BlkRange, SECTOR_BYTES, request, status};

/// Bytes in which an append is told where its data went.
pub const SECTOR_NUMBER_BYTES: usize = 8;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A request for the device.
    Io(Request),
    /// Data for the zone that begins at this byte, at its write pointer.
    Append(u64),
    /// Something with zones.
    Zone(ZoneRequest),
    /// The device's name.
    Id,
    /// Nothing: it is answered with this status.
    Refused(u8),
}

/// The outcome of a submitted request.
#[derive(Debug)]
pub struct Finished {
    /// The request.
    pub task: Task,
    /// Those of its chain.
    pub segments: Vec<Segment>,
    /// What the device says; of an append, where the data went.
    pub outcome: Result<u64, Error>,
    /// Its buffer.
    pub buffer: IoBuf,
}

/// A request.
#[derive(Debug)]
pub struct Task {
    /// The number of its chain.
    pub head: u16,
    /// What to do.
    pub kind: Kind,
    /// Of the chain's segments: where the data from the driver begins, where the room for the
    /// driver's does, and where that ends.
    parts: [u16; 3],
    /// Bytes of its data.
    pub len: usize,
    /// Bytes that are done, and in a read's case already written.
    pub done: usize,
    /// Where its status goes.
    pub status: u64,
    /// Bytes it is charged with while the device has it.
    pub charge: usize,
}

impl Task {
    /// The request in a chain, out of whose segments header and status are taken.
    #[inline]
    pub fn parse(head: u16, chain: &mut Chain, memory: &Memory) -> Result<Self, Broken> {
        let (readable, writable) = chain.segments.split_at_mut(chain.readable);
        let (header, from) = header(memory, readable)?;
        let last = writable.last_mut().ok_or(Broken::Short)?;
        last.len -= 1;
        let status = last.addr.wrapping_add(last.len.into());
        let is_whole = last.len == 0;
        let left = writable.len() - usize::from(is_whole);
        let (readable, writable) = (&readable[from..], &writable[..left]);
        let offset = header.sector.get().checked_mul(SECTOR_BYTES);
        let refused = Kind::Refused(status::IOERR);
        let (kind, len) = match header.kind.get() {
            request::IN => io(Op::Read, offset, total(writable)),
            request::OUT => io(Op::Write, offset, total(readable)),
            request::FLUSH => (Kind::Io(Request::flush()), 0),
            request::GET_ID => (Kind::Id, total(writable)),
            request::DISCARD => (range(Op::Discard, readable, memory)?, 0),
            request::WRITE_ZEROES => (range(Op::WriteZeroes, readable, memory)?, 0),
            // In front of the status there is room for a sector.
            request::ZONE_APPEND if total(writable) == SECTOR_NUMBER_BYTES as u64 => {
                append(offset, total(readable))
            }
            request::ZONE_APPEND => (refused, 0),
            request::ZONE_REPORT => (zone(offset.map(ZoneRequest::Report)), total(writable)),
            request::ZONE_OPEN => (zone_op(ZoneOp::Open, offset), 0),
            request::ZONE_CLOSE => (zone_op(ZoneOp::Close, offset), 0),
            request::ZONE_FINISH => (zone_op(ZoneOp::Finish, offset), 0),
            request::ZONE_RESET => (zone_op(ZoneOp::Reset, offset), 0),
            request::ZONE_RESET_ALL => (Kind::Zone(ZoneRequest::ResetAll), 0),
            _ => (Kind::Refused(status::UNSUPP), 0),
        };
        let (kind, len) = if len > MAX_REQUEST_BYTES as u64 { (refused, 0) } else { (kind, len as usize) };
        // A chain is shorter than these numbers' end.
        let parts = [from as u16, chain.readable as u16, (chain.readable + left) as u16];
        Ok(Self { head, kind, parts, len, done: 0, status, charge: 0 })
    }

    /// Behind its header: what the driver sends.
    #[inline]
    pub fn sent<'a>(&self, segments: &'a [Segment]) -> &'a [Segment] {
        &segments[usize::from(self.parts[0])..usize::from(self.parts[1])]
    }

    /// Before its status: what the driver is told.
    #[inline]
    pub fn room<'a>(&self, segments: &'a [Segment]) -> &'a [Segment] {
        &segments[usize::from(self.parts[1])..usize::from(self.parts[2])]
    }

    /// It is done: tells the driver what it asked for, of a read what is in `buffer` from
    /// [`done`](Self::done) on, of an append that it went to byte `at`. The status, and bytes told.
    ///
    /// # Errors
    /// The device handed back another buffer, in which there is no data for the driver.
    #[inline]
    pub fn finish(
        &self,
        memory: &Memory,
        segments: &[Segment],
        buffer: &[u8],
        at: u64,
    ) -> Result<(u8, usize), Error> {
        let (told, len) = match self.kind {
            Kind::Io(Request { op: Op::Read, .. }) if self.done + buffer.len() != self.len => {
                return Err(Error::Media);
            }
            Kind::Io(Request { op: Op::Read, .. }) => {
                (scatter(memory, self.room(segments), self.done, buffer), self.len)
            }
            Kind::Append(_) => {
                let sector = (at / SECTOR_BYTES).to_le_bytes();
                (scatter(memory, self.room(segments), 0, &sector), sector.len())
            }
            _ => (Ok(()), 0),
        };
        Ok(if told.is_ok() { (status::OK, len) } else { (status::IOERR, 0) })
    }

    /// Whether the device is changed.
    pub fn changes(&self) -> bool {
        match self.kind {
            Kind::Io(request) => matches!(request.op, Op::Write | Op::WriteZeroes | Op::Discard),
            Kind::Append(_) | Kind::Zone(ZoneRequest::Op(..) | ZoneRequest::ResetAll) => true,
            Kind::Zone(ZoneRequest::Report(_)) | Kind::Id | Kind::Refused(_) => false,
        }
    }

    /// Whether it goes the other way.
    pub fn is_read(&self) -> bool {
        matches!(self.kind, Kind::Io(Request { op: Op::Read, .. }))
    }

    /// What failed, for who looks after the device.
    pub fn failed(&self) -> Failed {
        match self.kind {
            Kind::Io(request) => match request.op {
                Op::Read => Failed::Read,
                Op::Write | Op::WriteZeroes => Failed::Write,
                Op::Discard => Failed::Trim,
                Op::Flush => Failed::Flush,
            },
            Kind::Append(_) | Kind::Zone(ZoneRequest::Op(..) | ZoneRequest::ResetAll) => Failed::Write,
            Kind::Zone(ZoneRequest::Report(_)) | Kind::Id | Kind::Refused(_) => Failed::Read,
        }
    }
}

/// A read or write of so many bytes.
fn io(op: Op, offset: Option<u64>, len: u64) -> (Kind, u64) {
    match offset {
        Some(offset) if len > 0 && len.is_multiple_of(SECTOR_BYTES) => {
            (Kind::Io(Request::new(op, offset, len)), len)
        }
        _ => (Kind::Refused(status::IOERR), 0),
    }
}

/// An append of so many bytes.
fn append(offset: Option<u64>, len: u64) -> (Kind, u64) {
    match io(Op::Write, offset, len) {
        (Kind::Io(request), len) => (Kind::Append(request.offset), len),
        refused => refused,
    }
}

fn zone(request: Option<ZoneRequest>) -> Kind {
    request.map_or(Kind::Refused(status::ZONE_INVALID_CMD), Kind::Zone)
}

fn zone_op(op: ZoneOp, offset: Option<u64>) -> Kind {
    zone(offset.map(|offset| ZoneRequest::Op(op, offset)))
}

/// A request without data, for the range that it carries.
fn range(op: Op, segments: &[Segment], memory: &Memory) -> Result<Kind, Broken> {
    let mut raw = [0; size_of::<BlkRange>()];
    if total(segments) != raw.len() as u64 {
        // One range is what the configuration allows.
        return Ok(Kind::Refused(status::IOERR));
    }
    gather(memory, segments, &mut raw)?;
    let range = BlkRange::read_from_bytes(&raw).map_err(|_| Broken::Short)?;
    let flags = match (op, range.flags.get()) {
        (_, 0) => Flags::empty(),
        (Op::WriteZeroes, 1) => Flags::MAY_FREE,
        _ => return Ok(Kind::Refused(status::UNSUPP)),
    };
    let sectors = range.sectors.get();
    let offset = range.sector.get().checked_mul(SECTOR_BYTES);
    let (Some(offset), 1..=MAX_RANGE_SECTORS) = (offset, sectors) else {
        return Ok(Kind::Refused(status::IOERR));
    };
    Ok(Kind::Io(Request::new(op, offset, u64::from(sectors) * SECTOR_BYTES).with(flags)))
}

/// How a device's error is told.
pub fn status_of(error: Error) -> u8 {
    match error {
        Error::Unsupported => status::UNSUPP,
        Error::ZoneWritePointer => status::ZONE_UNALIGNED_WP,
        Error::ZoneCondition | Error::ZoneBoundary => status::ZONE_INVALID_CMD,
        Error::ZoneTooManyOpen => status::ZONE_OPEN_RESOURCE,
        Error::ZoneTooManyActive => status::ZONE_ACTIVE_RESOURCE,
        _ => status::IOERR,
    }
}

/// How an error of an operation on a zone, or of an append, is told.
pub fn zone_status_of(error: Error) -> u8 {
    match error {
        Error::Misaligned | Error::OutOfRange => status::ZONE_INVALID_CMD,
        error => status_of(error),
    }
}

#[inline]
fn total(segments: &[Segment]) -> u64 {
    if let [segment] = segments {
        return segment.len.into();
    }
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

/// The header, which is taken out of the first segments, and how many had nothing else.
#[inline]
fn header(memory: &Memory, segments: &mut [Segment]) -> Result<(BlkHeader, usize), Broken> {
    const BYTES: usize = size_of::<BlkHeader>();
    if let Some(first) = segments.first_mut()
        && first.len as usize == BYTES
    {
        return Ok((transmute!(memory.array::<BYTES>(first.addr)?), 1));
    }
    let mut raw = [0; BYTES];
    let mut done = 0;
    for (place, segment) in segments.iter_mut().enumerate() {
        let n = (raw.len() - done).min(segment.len as usize);
        memory.read(segment.addr, &mut raw[done..done + n])?;
        done += n;
        if done == raw.len() {
            segment.addr = segment.addr.wrapping_add(n as u64);
            segment.len -= n as u32;
            return Ok((transmute!(raw), place + usize::from(segment.len == 0)));
        }
    }
    Err(Broken::Short)
}

/// Copies what is in the segments to memory of ours, as far as that has room.
#[inline]
pub fn gather(memory: &Memory, segments: &[Segment], into: &mut [u8]) -> Result<(), Unmapped> {
    match segments {
        [segment] if segment.len as usize >= into.len() => memory.read(segment.addr, into),
        _ => gather_pieces(memory, segments, into),
    }
}

fn gather_pieces(memory: &Memory, segments: &[Segment], mut into: &mut [u8]) -> Result<(), Unmapped> {
    for segment in segments {
        let n = into.len().min(segment.len as usize);
        let (part, rest) = into.split_at_mut(n);
        memory.read(segment.addr, part)?;
        into = rest;
    }
    if into.is_empty() { Ok(()) } else { Err(Unmapped) }
}

/// Copies `from` into the segments, behind their first `skip` bytes.
#[inline]
pub fn scatter(memory: &Memory, segments: &[Segment], skip: usize, from: &[u8]) -> Result<(), Unmapped> {
    match segments {
        [segment] if skip == 0 && segment.len as usize >= from.len() => memory.write(segment.addr, from),
        _ => scatter_pieces(memory, segments, skip, from),
    }
}

fn scatter_pieces(
    memory: &Memory,
    segments: &[Segment],
    mut skip: usize,
    mut from: &[u8],
) -> Result<(), Unmapped> {
    for segment in segments {
        let n = skip.min(segment.len as usize);
        skip -= n;
        let (part, rest) = from.split_at(from.len().min(segment.len as usize - n));
        if !part.is_empty() {
            memory.write(segment.addr.checked_add(n as u64).ok_or(Unmapped)?, part)?;
        }
        from = rest;
    }
    if from.is_empty() { Ok(()) } else { Err(Unmapped) }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::io::pwrite;
    use zerocopy::IntoBytes as _;

    use super::*;
    use crate::wire::MemRegion;

    const BASE: u64 = 0x1000;

    /// Memory with this header at its start, and three segments behind each other in it.
    fn memory(header: &BlkHeader) -> Memory {
        let file = memfd_create("task", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 4096).unwrap();
        pwrite(&file, header.as_bytes(), 0).unwrap();
        let region = MemRegion { guest: BASE, size: 4096, user: 0, offset: 0 };
        Memory::default().with(region, &file).unwrap()
    }

    #[test]
    fn headers_and_statuses_may_lie_in_any_pieces() {
        let header = BlkHeader { kind: request::OUT.into(), reserved: 0.into(), sector: 3.into() };
        let memory = memory(&header);
        let segment = |at, len| Segment { addr: BASE + at, len };
        let parse = |readable: &[Segment], writable: &[Segment]| {
            let segments = [readable, writable].concat();
            let mut chain = Chain { segments, readable: readable.len() };
            Task::parse(7, &mut chain, &memory).map(|task| (task, chain.segments))
        };
        let (task, all) =
            parse(&[segment(0, 3), segment(3, 13), segment(512, 512)], &[segment(100, 1)]).unwrap();
        assert_eq!(
            (task.kind, task.len, task.status),
            (Kind::Io(Request::write(1536, 512)), 512, BASE + 100)
        );
        assert_eq!((task.sent(&all), task.room(&all)), (&[segment(512, 512)][..], &[][..]));
        let (task, all) = parse(&[segment(0, 16 + 512)], &[segment(90, 8), segment(100, 2)]).unwrap();
        assert_eq!((task.sent(&all), task.status), (&[segment(16, 512)][..], BASE + 101));
        assert_eq!(task.room(&all), [segment(90, 8), segment(100, 1)]);
        for (readable, writable) in [
            (&[segment(0, 15)][..], &[segment(100, 1)][..]),
            (&[], &[segment(100, 1)]),
            (&[segment(0, 16)], &[]),
        ] {
            assert_eq!(parse(readable, writable).unwrap_err(), Broken::Short);
        }
        assert_eq!(parse(&[segment(8192, 16)], &[segment(0, 1)]).unwrap_err(), Broken::Memory);
    }

    #[test]
    fn offsets_that_no_device_has_are_refused() {
        let refused = (Kind::Refused(status::IOERR), 0);
        assert_eq!(io(Op::Read, u64::MAX.checked_mul(SECTOR_BYTES), 512), refused);
        assert_eq!(io(Op::Read, Some(0), 0), refused);
        assert_eq!(io(Op::Read, Some(0), 513), refused);
        assert_eq!(io(Op::Read, Some(512), 512), (Kind::Io(Request::read(512, 512)), 512));
    }

    #[test]
    fn errors_of_other_than_zones_are_io_errors() {
        let of_zones = |error: &Error| format!("{error:?}").starts_with("Zone");
        for error in Error::ALL.into_iter().filter(|error| !of_zones(error)) {
            let wanted = if error == Error::Unsupported { status::UNSUPP } else { status::IOERR };
            assert_eq!(status_of(error), wanted);
        }
        for error in Error::ALL.into_iter().filter(of_zones) {
            assert!((3..=6).contains(&status_of(error)), "{error}");
        }
    }
}
