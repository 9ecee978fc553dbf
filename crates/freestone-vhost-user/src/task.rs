//! One request, as it was copied out of the frontend's memory.

use freestone_core::device::zoned::ZoneOp;
use freestone_core::device::{Error, Failed, Flags, IoBuf, Op, Request};
use zerocopy::FromBytes;

use crate::disk::{MAX_RANGE_SECTORS, MAX_REQUEST_BYTES};
use crate::memory::{Memory, Unmapped};
use crate::ring::{Broken, Chain, Segment};
use crate::wire::{BlkHeader, BlkRange, SECTOR_BYTES, request, status};
use crate::zones::ZoneRequest;

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
    /// Where its data is.
    pub data: Vec<Segment>,
    /// Bytes of it.
    pub len: usize,
    /// Bytes that are done, and in a read's case already written.
    pub done: usize,
    /// Where its status goes.
    pub status: u64,
    /// Bytes it is charged with while the device has it.
    pub charge: usize,
}

impl Task {
    /// The request in a chain, out of which its data is taken.
    pub fn parse(head: u16, chain: &mut Chain, memory: &Memory) -> Result<Self, Broken> {
        let mut raw = [0; size_of::<BlkHeader>()];
        let readable = total(&chain.readable);
        if readable < raw.len() as u64 {
            return Err(Broken::Short);
        }
        gather(memory, &chain.readable, &mut raw)?;
        drop_front(&mut chain.readable, raw.len() as u32);
        let status = take_last(&mut chain.writable).ok_or(Broken::Short)?;
        let header = BlkHeader::read_from_bytes(&raw).map_err(|_| Broken::Short)?;
        let (read, written) = (readable - raw.len() as u64, total(&chain.writable));
        let offset = header.sector.get().checked_mul(SECTOR_BYTES);
        let refused = Kind::Refused(status::IOERR);
        let (kind, len) = match header.kind.get() {
            request::IN => (io(Op::Read, offset, written), written),
            request::OUT => (io(Op::Write, offset, read), read),
            request::FLUSH => (Kind::Io(Request::flush()), 0),
            request::GET_ID => (Kind::Id, written),
            // In front of the status there is room for a sector.
            request::ZONE_APPEND if written == SECTOR_NUMBER_BYTES as u64 => (append(offset, read), read),
            request::ZONE_APPEND => (refused, 0),
            request::ZONE_REPORT => (zone(offset.map(ZoneRequest::Report)), written),
            request::ZONE_OPEN => (zone_op(ZoneOp::Open, offset), 0),
            request::ZONE_CLOSE => (zone_op(ZoneOp::Close, offset), 0),
            request::ZONE_FINISH => (zone_op(ZoneOp::Finish, offset), 0),
            request::ZONE_RESET => (zone_op(ZoneOp::Reset, offset), 0),
            request::ZONE_RESET_ALL => (Kind::Zone(ZoneRequest::ResetAll), 0),
            request::DISCARD => (range(Op::Discard, &chain.readable, read, memory)?, 0),
            request::WRITE_ZEROES => (range(Op::WriteZeroes, &chain.readable, read, memory)?, 0),
            _ => (Kind::Refused(status::UNSUPP), 0),
        };
        let (kind, len) = if len > MAX_REQUEST_BYTES as u64 { (refused, 0) } else { (kind, len as usize) };
        let data = match header.kind.get() {
            request::OUT | request::ZONE_APPEND => &mut chain.readable,
            _ => &mut chain.writable,
        };
        Ok(Self { head, kind, data: std::mem::take(data), len, done: 0, status, charge: 0 })
    }

    /// Whether the data goes from the frontend to the device.
    pub fn is_write(&self) -> bool {
        matches!(self.kind, Kind::Io(Request { op: Op::Write, .. }) | Kind::Append(_))
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
fn io(op: Op, offset: Option<u64>, len: u64) -> Kind {
    match offset {
        Some(offset) if len > 0 && len.is_multiple_of(SECTOR_BYTES) => {
            Kind::Io(Request::new(op, offset, len))
        }
        _ => Kind::Refused(status::IOERR),
    }
}

/// An append of so many bytes.
fn append(offset: Option<u64>, len: u64) -> Kind {
    match io(Op::Write, offset, len) {
        Kind::Io(request) => Kind::Append(request.offset),
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
fn range(op: Op, segments: &[Segment], len: u64, memory: &Memory) -> Result<Kind, Broken> {
    let mut raw = [0; size_of::<BlkRange>()];
    if len != raw.len() as u64 {
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

fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

/// Leaves out the first bytes, of which there are as many.
fn drop_front(segments: &mut Vec<Segment>, bytes: u32) {
    let mut left = bytes;
    segments.retain_mut(|segment| {
        let n = left.min(segment.len);
        left -= n;
        segment.addr = segment.addr.wrapping_add(n.into());
        segment.len -= n;
        segment.len > 0
    });
}

/// Leaves out the last byte; answers where it is.
fn take_last(segments: &mut Vec<Segment>) -> Option<u64> {
    let last = segments.last_mut()?;
    last.len -= 1;
    let at = last.addr.wrapping_add(last.len.into());
    segments.pop_if(|last| last.len == 0);
    Some(at)
}

/// Copies what is in the segments to memory of ours, as far as that has room.
pub fn gather(memory: &Memory, segments: &[Segment], mut into: &mut [u8]) -> Result<(), Unmapped> {
    for segment in segments {
        let n = into.len().min(segment.len as usize);
        let (part, rest) = into.split_at_mut(n);
        memory.read(segment.addr, part)?;
        into = rest;
    }
    if into.is_empty() { Ok(()) } else { Err(Unmapped) }
}

/// Copies `from` into the segments, behind their first `skip` bytes.
pub fn scatter(memory: &Memory, segments: &[Segment], skip: usize, mut from: &[u8]) -> Result<(), Unmapped> {
    let mut skip = skip;
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
    use super::*;

    #[test]
    fn headers_and_statuses_may_lie_in_any_pieces() {
        let segment = |addr, len| Segment { addr, len };
        let mut front = vec![segment(0, 3), segment(10, 13), segment(40, 5)];
        drop_front(&mut front, 16);
        assert_eq!(front, [segment(40, 5)]);
        drop_front(&mut front, 2);
        assert_eq!(front, [segment(42, 3)]);
        let mut back = vec![segment(8, 2), segment(20, 1)];
        assert_eq!(take_last(&mut back), Some(20));
        assert_eq!(take_last(&mut back), Some(9));
        assert_eq!(back, [segment(8, 1)]);
        assert_eq!(take_last(&mut back), Some(8));
        assert_eq!(take_last(&mut back), None);
    }

    #[test]
    fn offsets_that_no_device_has_are_refused() {
        assert_eq!(io(Op::Read, u64::MAX.checked_mul(SECTOR_BYTES), 512), Kind::Refused(status::IOERR));
        assert_eq!(io(Op::Read, Some(0), 0), Kind::Refused(status::IOERR));
        assert_eq!(io(Op::Read, Some(0), 513), Kind::Refused(status::IOERR));
        assert_eq!(io(Op::Read, Some(512), 512), Kind::Io(Request::read(512, 512)));
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
