//! Parses request descriptors.

use freestone_core::device::zoned::{ZoneOp, ZoneRequest};
use freestone_core::device::{Error, FailureKind, Flags, IoBuf, Op, Request};

use crate::format::zones::ROW_BYTES;
use crate::kernel::abi::{IoDesc, SECTOR_BYTES, op, op_flag};

#[derive(Debug)]
pub struct CompletedRequest {
    pub task: Task,
    /// Result of the device; for an append, the byte offset at which the data was written.
    pub outcome: Result<u64, Error>,
    pub buffer: IoBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A read, write, flush, discard or write zeroes.
    Io(Request),
    /// An append to the zone that starts at the offset of the request.
    Append(Request),
    /// A zone operation or report.
    Zone(ZoneRequest),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    pub tag: u16,
    /// Number of the request among the requests of its tag; see [`Slot::serial`](crate::queue::slots::Slot).
    pub serial: u64,
    pub kind: Kind,
    /// Length of the data in bytes; 0 for requests without data.
    pub len: usize,
    /// Number of bytes that the device completed inline before the rest was submitted.
    pub done: usize,
    /// Bytes charged to the memory budget while the request is in flight.
    pub charge: usize,
}

impl Task {
    /// Parses a descriptor. `max_bytes` is the largest length of data; `zoned` permits zone operations.
    ///
    /// # Errors
    /// Fails if the operation is not supported or the range is invalid.
    pub fn parse(descriptor: &IoDesc, max_bytes: usize, zoned: bool) -> Result<Self, Error> {
        let offset = descriptor.start_sector.checked_mul(SECTOR_BYTES).ok_or(Error::OutOfRange);
        let zone = |op| Ok(Self::new(Kind::Zone(ZoneRequest::Op(op, offset?)), 0));
        let op = match descriptor.op() {
            op::READ => Op::Read,
            op::WRITE => Op::Write,
            // A flush has no range.
            op::FLUSH => return Ok(Self::new(Kind::Io(Request::flush()), 0)),
            op::DISCARD => Op::Discard,
            op::WRITE_ZEROES => Op::WriteZeroes,
            op::ZONE_APPEND if zoned => Op::Write,
            op::ZONE_OPEN if zoned => return zone(ZoneOp::Open),
            op::ZONE_CLOSE if zoned => return zone(ZoneOp::Close),
            op::ZONE_FINISH if zoned => return zone(ZoneOp::Finish),
            op::ZONE_RESET if zoned => return zone(ZoneOp::Reset),
            op::ZONE_RESET_ALL if zoned => return Ok(Self::new(Kind::Zone(ZoneRequest::ResetAll), 0)),
            op::REPORT_ZONES if zoned => {
                // The report contains as many zones as fit; the kernel requests the rest with another report.
                let rows = (descriptor.nr_sectors as usize).min(max_bytes / ROW_BYTES);
                let kind = Kind::Zone(ZoneRequest::Report(offset?));
                return if rows == 0 {
                    Err(Error::Misaligned)
                } else {
                    Ok(Self::new(kind, rows * ROW_BYTES))
                };
            }
            _ => return Err(Error::Unsupported),
        };
        let (bytes, offset) = (u64::from(descriptor.nr_sectors) * SECTOR_BYTES, offset?);
        if bytes == 0 {
            return Err(Error::Misaligned);
        }
        let has_data = matches!(op, Op::Read | Op::Write);
        if has_data && bytes > max_bytes as u64 {
            return Err(Error::OutOfRange);
        }
        let mut flags = Flags::empty();
        flags.set(Flags::FUA, op != Op::Read && descriptor.op_flags & op_flag::FUA != 0);
        let may_free = op == Op::WriteZeroes && descriptor.op_flags & op_flag::NOUNMAP == 0;
        flags.set(Flags::MAY_FREE, may_free);
        let request = Request::new(op, offset, bytes).with(flags);
        let is_append = descriptor.op() == op::ZONE_APPEND;
        let kind = if is_append { Kind::Append(request) } else { Kind::Io(request) };
        Ok(Self::new(kind, if has_data { bytes as usize } else { 0 }))
    }

    fn new(kind: Kind, len: usize) -> Self {
        Self { tag: 0, serial: 0, kind, len, done: 0, charge: 0 }
    }

    /// Returns true for requests whose data is written to the device.
    pub fn is_write(&self) -> bool {
        matches!(self.kind, Kind::Io(Request { op: Op::Write, .. }) | Kind::Append(_))
    }

    /// Returns true for requests that return data.
    pub fn is_read(&self) -> bool {
        let is_report = matches!(self.kind, Kind::Zone(ZoneRequest::Report(_)));
        is_report || matches!(self.kind, Kind::Io(Request { op: Op::Read, .. }))
    }

    /// Returns the result of a successful request: the length of the data in bytes.
    pub fn result(&self) -> i32 {
        match self.kind {
            // At the end of a device the kernel's buffer has room for more zones than requested. The kernel
            // would treat a smaller result as a partial report. It zeroes the buffer first.
            Kind::Zone(ZoneRequest::Report(_)) => i32::MAX,
            _ => self.len as i32,
        }
    }

    /// Returns the kind under which failures of the request are counted.
    pub fn failed(&self) -> FailureKind {
        match self.kind {
            Kind::Io(request) => request.op.into(),
            Kind::Zone(ZoneRequest::Report(_)) => FailureKind::Read,
            Kind::Append(_) | Kind::Zone(_) => FailureKind::Write,
        }
    }
}

/// Returns the result of a failed request, a negative errno. The block layer maps errors without a status of
/// their own to an I/O error.
pub fn result_of(error: Error) -> i32 {
    -error.errno()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: usize = 512 << 10;

    fn parse(op: u8, flags: u32, start_sector: u64, nr_sectors: u32) -> Result<Request, Error> {
        let descriptor = IoDesc { op_flags: u32::from(op) | flags, nr_sectors, start_sector, addr: 7 };
        let task = Task::parse(&descriptor, MAX, false)?;
        let Kind::Io(request) = task.kind else { panic!("{task:?}") };
        Ok(request)
    }

    fn zone(op: u8, start_sector: u64, nr_sectors: u32) -> Result<(Kind, usize), Error> {
        let descriptor = IoDesc { op_flags: op.into(), nr_sectors, start_sector, addr: 0 };
        Task::parse(&descriptor, MAX, true).map(|task| (task.kind, task.len))
    }

    #[test]
    fn operations_and_flags_are_parsed() {
        assert_eq!(parse(op::READ, op_flag::FUA, 8, 1), Ok(Request::read(4096, 512)));
        assert_eq!(parse(op::WRITE, 0, 1, 8), Ok(Request::write(512, 4096)));
        assert_eq!(parse(op::WRITE, op_flag::FUA, 0, 8), Ok(Request::write(0, 4096).with(Flags::FUA)));
        assert_eq!(parse(op::FLUSH, 0, u64::MAX, 3), Ok(Request::flush()));
        assert_eq!(parse(op::DISCARD, 1 << 8, 0, 1 << 20), Ok(Request::new(Op::Discard, 0, 1 << 29)));
        let zeroes = Request::new(Op::WriteZeroes, 0, 4096);
        assert_eq!(parse(op::WRITE_ZEROES, op_flag::NOUNMAP, 0, 8), Ok(zeroes));
        assert_eq!(parse(op::WRITE_ZEROES, 0, 0, 8), Ok(zeroes.with(Flags::MAY_FREE)));
    }

    #[test]
    fn unsupported_operation_or_range_is_refused() {
        for op in [4, 6, 10, 11, 12, 13, 14, 15, 18, 32, 255] {
            assert_eq!(parse(op, 0, 0, 8), Err(Error::Unsupported), "{op}");
        }
        assert_eq!(parse(op::READ, 0, 0, 0), Err(Error::Misaligned));
        assert_eq!(parse(op::READ, 0, 0, (MAX / 512) as u32 + 1), Err(Error::OutOfRange));
        assert_eq!(parse(op::WRITE, 0, 0, u32::MAX), Err(Error::OutOfRange));
        assert_eq!(parse(op::WRITE, 0, u64::MAX / 256, 1), Err(Error::OutOfRange));
        // The sum of offset and length may overflow; the device checks that.
        let end = parse(op::WRITE, 0, u64::MAX / 512, 8).unwrap();
        assert_eq!(end.check_range(u64::MAX, 1), Err(Error::OutOfRange));
    }

    #[test]
    fn results_are_lengths_or_negative_errnos() {
        let descriptor = IoDesc { op_flags: 1, nr_sectors: 16, ..IoDesc::default() };
        assert_eq!(Task::parse(&descriptor, MAX, false).unwrap().result(), 8192);
        let flush = IoDesc { op_flags: 2, nr_sectors: 16, ..IoDesc::default() };
        assert_eq!(Task::parse(&flush, MAX, false).unwrap().result(), 0);
        for error in Error::ALL {
            assert!(result_of(error) < 0 && result_of(error) > -4096);
        }
        assert_eq!(result_of(Error::Unsupported), -95);
    }

    #[test]
    fn zone_operations_are_parsed() {
        let op = |op| Ok((Kind::Zone(ZoneRequest::Op(op, 4096)), 0));
        assert_eq!(zone(op::ZONE_OPEN, 8, 64), op(ZoneOp::Open));
        assert_eq!(zone(op::ZONE_CLOSE, 8, 0), op(ZoneOp::Close));
        assert_eq!(zone(op::ZONE_FINISH, 8, 64), op(ZoneOp::Finish));
        assert_eq!(zone(op::ZONE_RESET, 8, 64), op(ZoneOp::Reset));
        assert_eq!(zone(op::ZONE_RESET_ALL, u64::MAX, 0), Ok((Kind::Zone(ZoneRequest::ResetAll), 0)));
        let append = Kind::Append(Request::write(4096, 8192));
        assert_eq!(zone(op::ZONE_APPEND, 8, 16), Ok((append, 8192)));
        let report = Kind::Zone(ZoneRequest::Report(4096));
        assert_eq!(zone(op::REPORT_ZONES, 8, 3), Ok((report, 3 * 64)));
        // A correct kernel never sends these descriptors.
        assert_eq!(zone(op::REPORT_ZONES, 8, u32::MAX), Ok((report, MAX)));
        assert_eq!(zone(op::REPORT_ZONES, 8, 0), Err(Error::Misaligned));
        assert_eq!(zone(op::REPORT_ZONES, u64::MAX / 256, 1), Err(Error::OutOfRange));
        assert_eq!(zone(op::ZONE_RESET, u64::MAX / 256, 1), Err(Error::OutOfRange));
        assert_eq!(zone(op::ZONE_APPEND, 8, 0), Err(Error::Misaligned));
        assert_eq!(zone(op::ZONE_APPEND, 8, u32::MAX), Err(Error::OutOfRange));
        for op in [4, 6, 9, 16, 17, 19, 255] {
            assert_eq!(zone(op, 0, 8), Err(Error::Unsupported), "{op}");
        }
    }
}
