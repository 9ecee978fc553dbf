//! Parses requests from descriptor chains, and copies their data.

use freestone_core::device::zoned::{ZoneOp, ZoneRequest};
use freestone_core::device::{Error, FailureKind, Flags, IoBuf, Op, Request};
use zerocopy::{FromBytes as _, transmute};

use crate::disk::{MAX_RANGE_SECTORS, MAX_REQUEST_BYTES};
use crate::memory::{Memory, UnmappedAddress};
use crate::ring::{Chain, RingError, Segment};
use crate::wire::{BlkHeader, BlkRange, SECTOR_BYTES, request, status};

/// Size of the sector number that an append returns, in bytes.
pub const SECTOR_NUMBER_BYTES: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A read, write, flush, discard or write zeroes.
    Io(Request),
    /// An append to the zone that starts at this byte offset.
    Append(u64),
    Zone(ZoneRequest),
    /// A query of the device's name (`GET_ID`).
    Id,
    /// An invalid request, which completes with this status.
    Refused(u8),
}

#[derive(Debug)]
pub struct CompletedRequest {
    pub task: Task,
    /// Segments of the request's chain.
    pub segments: Vec<Segment>,
    /// Result of the device; for an append, the byte offset at which the data was written.
    pub outcome: Result<u64, Error>,
    pub buffer: IoBuf,
}

#[derive(Debug)]
pub struct Task {
    /// Head descriptor of the chain.
    pub head: u16,
    pub kind: Kind,
    /// Indices into the chain's segments: start of the driver's data, start of the space for the
    /// reply, and end of that space.
    parts: [u16; 3],
    /// Length of the data in bytes.
    pub len: usize,
    /// Number of bytes that the device completed before the rest was submitted. For a read, these
    /// are already copied to the driver.
    pub done: usize,
    /// Guest address of the status byte.
    pub status: u64,
    /// Bytes charged to the memory budget while the request is in flight.
    pub charge: usize,
}

impl Task {
    /// Parses the request of a chain. Removes the header and the status byte from the segments.
    #[inline]
    pub fn parse(head: u16, chain: &mut Chain, memory: &Memory) -> Result<Self, RingError> {
        let (readable, writable) = chain.segments.split_at_mut(chain.readable);
        let (header, from) = header(memory, readable)?;
        let last = writable.last_mut().ok_or(RingError::RequestTooShort)?;
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
            // The space before the status must have the size of a sector number.
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
        // MAX_CHAIN limits these indices to 16 bits.
        let parts = [from as u16, chain.readable as u16, (chain.readable + left) as u16];
        Ok(Self { head, kind, parts, len, done: 0, status, charge: 0 })
    }

    /// Returns the segments of the driver's data, after the header.
    #[inline]
    pub fn data_segments<'a>(&self, segments: &'a [Segment]) -> &'a [Segment] {
        &segments[usize::from(self.parts[0])..usize::from(self.parts[1])]
    }

    /// Returns the segments for the reply, before the status.
    #[inline]
    pub fn reply_segments<'a>(&self, segments: &'a [Segment]) -> &'a [Segment] {
        &segments[usize::from(self.parts[1])..usize::from(self.parts[2])]
    }

    /// Copies the reply of a successful request to the driver. The reply is the data in `buffer`
    /// for a read, whose first [`done`](Self::done) bytes are already copied, or the sector of byte
    /// `at` for an append. Returns the status and the number of bytes of the reply.
    ///
    /// # Errors
    /// Fails if the device returned a buffer of another size, which has no valid data for the
    /// driver.
    #[inline]
    pub fn finish(
        &self,
        memory: &Memory,
        segments: &[Segment],
        buffer: &[u8],
        at: u64,
    ) -> Result<(u8, usize), Error> {
        let (copied, len) = match self.kind {
            Kind::Io(Request { op: Op::Read, .. }) if self.done + buffer.len() != self.len => {
                return Err(Error::Media);
            }
            Kind::Io(Request { op: Op::Read, .. }) => {
                (scatter(memory, self.reply_segments(segments), self.done, buffer), self.len)
            }
            Kind::Append(_) => {
                let sector = (at / SECTOR_BYTES).to_le_bytes();
                (scatter(memory, self.reply_segments(segments), 0, &sector), sector.len())
            }
            _ => (Ok(()), 0),
        };
        Ok(if copied.is_ok() { (status::OK, len) } else { (status::IOERR, 0) })
    }

    pub fn is_modifying(&self) -> bool {
        match self.kind {
            Kind::Io(request) => matches!(request.op, Op::Write | Op::WriteZeroes | Op::Discard),
            Kind::Append(_) | Kind::Zone(ZoneRequest::Op(..) | ZoneRequest::ResetAll) => true,
            Kind::Zone(ZoneRequest::Report(_)) | Kind::Id | Kind::Refused(_) => false,
        }
    }

    pub fn is_read(&self) -> bool {
        matches!(self.kind, Kind::Io(Request { op: Op::Read, .. }))
    }

    /// Returns the kind under which failures of the request are counted.
    pub fn failed(&self) -> FailureKind {
        match self.kind {
            Kind::Io(request) => request.op.into(),
            Kind::Append(_) | Kind::Zone(ZoneRequest::Op(..) | ZoneRequest::ResetAll) => FailureKind::Write,
            Kind::Zone(ZoneRequest::Report(_)) | Kind::Id | Kind::Refused(_) => FailureKind::Read,
        }
    }
}

fn io(op: Op, offset: Option<u64>, len: u64) -> (Kind, u64) {
    match offset {
        Some(offset) if len > 0 && len.is_multiple_of(SECTOR_BYTES) => {
            (Kind::Io(Request::new(op, offset, len)), len)
        }
        _ => (Kind::Refused(status::IOERR), 0),
    }
}

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

/// Returns a request for the range in the driver's data, or a refusal if the range is not valid.
fn range(op: Op, segments: &[Segment], memory: &Memory) -> Result<Kind, RingError> {
    let mut raw = [0; size_of::<BlkRange>()];
    if total(segments) != raw.len() as u64 {
        // The configuration allows one range per request.
        return Ok(Kind::Refused(status::IOERR));
    }
    gather(memory, segments, &mut raw)?;
    let range = BlkRange::read_from_bytes(&raw).map_err(|_| RingError::RequestTooShort)?;
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

/// Converts a device error to a virtio status.
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

/// Converts a device error of a zone operation or append to a virtio status.
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

/// Removes the header from the first segments. Returns the header and the number of segments that
/// became empty.
#[inline]
fn header(memory: &Memory, segments: &mut [Segment]) -> Result<(BlkHeader, usize), RingError> {
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
    Err(RingError::RequestTooShort)
}

/// Copies data from the segments into `into`. Fails if the segments have fewer bytes or are outside
/// the memory.
#[inline]
pub fn gather(memory: &Memory, segments: &[Segment], into: &mut [u8]) -> Result<(), UnmappedAddress> {
    match segments {
        [segment] if segment.len as usize >= into.len() => memory.read(segment.addr, into),
        _ => gather_pieces(memory, segments, into),
    }
}

fn gather_pieces(memory: &Memory, segments: &[Segment], mut into: &mut [u8]) -> Result<(), UnmappedAddress> {
    for segment in segments {
        let n = into.len().min(segment.len as usize);
        let (part, rest) = into.split_at_mut(n);
        memory.read(segment.addr, part)?;
        into = rest;
    }
    if into.is_empty() { Ok(()) } else { Err(UnmappedAddress) }
}

/// Checks like [`gather`] that the segments have `len` bytes in the memory, but copies nothing.
pub fn check(memory: &Memory, segments: &[Segment], mut len: usize) -> Result<(), UnmappedAddress> {
    for segment in segments {
        let n = len.min(segment.len as usize);
        memory.check(segment.addr, n)?;
        len -= n;
    }
    if len == 0 { Ok(()) } else { Err(UnmappedAddress) }
}

/// Copies `from` into the segments, after their first `skip` bytes. Fails if the segments have
/// fewer bytes or are outside the memory.
#[inline]
pub fn scatter(
    memory: &Memory,
    segments: &[Segment],
    skip: usize,
    from: &[u8],
) -> Result<(), UnmappedAddress> {
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
) -> Result<(), UnmappedAddress> {
    for segment in segments {
        let n = skip.min(segment.len as usize);
        skip -= n;
        let (part, rest) = from.split_at(from.len().min(segment.len as usize - n));
        if !part.is_empty() {
            memory.write(segment.addr.checked_add(n as u64).ok_or(UnmappedAddress)?, part)?;
        }
        from = rest;
    }
    if from.is_empty() { Ok(()) } else { Err(UnmappedAddress) }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::io::pwrite;
    use zerocopy::IntoBytes as _;

    use super::*;
    use crate::wire::MemRegion;

    const BASE: u64 = 0x1000;

    /// Returns a memory of one page that starts with `header`.
    fn memory(header: &BlkHeader) -> Memory {
        let file = memfd_create("task", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 4096).unwrap();
        pwrite(&file, header.as_bytes(), 0).unwrap();
        let region = MemRegion { guest: BASE, size: 4096, user: 0, offset: 0 };
        Memory::default().with_region(region, &file).unwrap()
    }

    #[test]
    fn header_and_status_may_span_segments() {
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
        assert_eq!(
            (task.data_segments(&all), task.reply_segments(&all)),
            (&[segment(512, 512)][..], &[][..])
        );
        let (task, all) = parse(&[segment(0, 16 + 512)], &[segment(90, 8), segment(100, 2)]).unwrap();
        assert_eq!((task.data_segments(&all), task.status), (&[segment(16, 512)][..], BASE + 101));
        assert_eq!(task.reply_segments(&all), [segment(90, 8), segment(100, 1)]);
        for (readable, writable) in [
            (&[segment(0, 15)][..], &[segment(100, 1)][..]),
            (&[], &[segment(100, 1)]),
            (&[segment(0, 16)], &[]),
        ] {
            assert_eq!(parse(readable, writable).unwrap_err(), RingError::RequestTooShort);
        }
        assert_eq!(parse(&[segment(8192, 16)], &[segment(0, 1)]).unwrap_err(), RingError::Memory);
    }

    #[test]
    fn invalid_ranges_are_refused() {
        let refused = (Kind::Refused(status::IOERR), 0);
        assert_eq!(io(Op::Read, u64::MAX.checked_mul(SECTOR_BYTES), 512), refused);
        assert_eq!(io(Op::Read, Some(0), 0), refused);
        assert_eq!(io(Op::Read, Some(0), 513), refused);
        assert_eq!(io(Op::Read, Some(512), 512), (Kind::Io(Request::read(512, 512)), 512));
    }

    #[test]
    fn only_zone_errors_have_zone_statuses() {
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
