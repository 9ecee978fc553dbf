//! One request, as its descriptor was copied out of the driver's memory.

use freestone_core::device::zoned::{ZoneOp, ZoneRequest};
use freestone_core::device::{Error, Failed, Flags, IoBuf, Op, Request};

use crate::abi::{IoDesc, SECTOR_BYTES, op, op_flag};
use crate::zones::ROW_BYTES;

/// The outcome of a submitted request.
#[derive(Debug)]
pub struct Finished {
    /// The request.
    pub task: Task,
    /// What the device says; of an append, the byte that the data went to.
    pub outcome: Result<u64, Error>,
    /// Its buffer.
    pub buffer: IoBuf,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A request for the device.
    Io(Request),
    /// A write to the zone that begins at its offset, at the write pointer.
    Append(Request),
    /// Something with zones.
    Zone(ZoneRequest),
}

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    /// The tag it came with.
    pub tag: u16,
    /// Which request of that tag.
    pub serial: u64,
    /// What to do.
    pub kind: Kind,
    /// Bytes of data that come with it or go back.
    pub len: usize,
    /// Bytes that were done before it was submitted.
    pub done: usize,
    /// Bytes it is charged with while the device has it.
    pub charge: usize,
}

impl Task {
    /// The request in a descriptor of a device that is `zoned` or not; it may have `max_bytes` of data.
    ///
    /// # Errors
    /// It is none of the operations that are offered, or its range is none.
    pub fn parse(descriptor: &IoDesc, max_bytes: usize, zoned: bool) -> Result<Self, Error> {
        let offset = descriptor.start_sector.checked_mul(SECTOR_BYTES).ok_or(Error::OutOfRange);
        let zone = |op| Ok(Self::new(Kind::Zone(ZoneRequest::Op(op, offset?)), 0));
        let op = match descriptor.op() {
            op::READ => Op::Read,
            op::WRITE => Op::Write,
            // Its range says nothing.
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
                // As many as fit; the kernel asks again for the others.
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

    /// Whether its data goes to the device.
    pub fn is_write(&self) -> bool {
        matches!(self.kind, Kind::Io(Request { op: Op::Write, .. }) | Kind::Append(_))
    }

    /// Whether data goes back.
    pub fn is_read(&self) -> bool {
        let is_report = matches!(self.kind, Kind::Zone(ZoneRequest::Report(_)));
        is_report || matches!(self.kind, Kind::Io(Request { op: Op::Read, .. }))
    }

    /// What a success is told as: the bytes of data.
    pub fn result(&self) -> i32 {
        match self.kind {
            // The kernel has room for more zones than it asks for at the end of a device, and takes
            // less for a part. Behind the last is what it has put there, zeroes.
            Kind::Zone(ZoneRequest::Report(_)) => i32::MAX,
            _ => self.len as i32,
        }
    }

    /// What failed, for who looks after the device.
    pub fn failed(&self) -> Failed {
        match self.kind {
            Kind::Io(request) => failed(request.op),
            Kind::Zone(ZoneRequest::Report(_)) => Failed::Read,
            Kind::Append(_) | Kind::Zone(_) => Failed::Write,
        }
    }
}

fn failed(op: Op) -> Failed {
    match op {
        Op::Read => Failed::Read,
        Op::Write | Op::WriteZeroes => Failed::Write,
        Op::Discard => Failed::Trim,
        Op::Flush => Failed::Flush,
    }
}

/// How a device's error is told. What the block layer has no status for it makes an I/O error.
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
    fn operations_and_their_flags() {
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
    fn what_is_not_offered_or_no_range_is_refused() {
        for op in [4, 6, 10, 11, 12, 13, 14, 15, 18, 32, 255] {
            assert_eq!(parse(op, 0, 0, 8), Err(Error::Unsupported), "{op}");
        }
        assert_eq!(parse(op::READ, 0, 0, 0), Err(Error::Misaligned));
        assert_eq!(parse(op::READ, 0, 0, (MAX / 512) as u32 + 1), Err(Error::OutOfRange));
        assert_eq!(parse(op::WRITE, 0, 0, u32::MAX), Err(Error::OutOfRange));
        assert_eq!(parse(op::WRITE, 0, u64::MAX / 256, 1), Err(Error::OutOfRange));
        // The sum may overflow: that is the device's check.
        let end = parse(op::WRITE, 0, u64::MAX / 512, 8).unwrap();
        assert_eq!(end.check_place(u64::MAX, 1), Err(Error::OutOfRange));
    }

    #[test]
    fn successes_are_whole_and_errors_negative() {
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
    fn operations_of_zones() {
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
        // What no honest kernel says.
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
