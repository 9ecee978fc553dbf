//! One request, as its descriptor was copied out of the driver's memory.

use freestone_core::device::{Error, Failed, Flags, IoBuf, Op, Request};

use crate::abi::{IoDesc, SECTOR_BYTES, op, op_flag};

/// The outcome of a submitted request.
#[derive(Debug)]
pub struct Finished {
    /// The request.
    pub task: Task,
    /// What the device says.
    pub outcome: Result<(), Error>,
    /// Its buffer.
    pub buffer: IoBuf,
}

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    /// The tag it came with.
    pub tag: u16,
    /// Which request of that tag.
    pub serial: u64,
    /// For the device.
    pub request: Request,
    /// Bytes of data, of a read or write.
    pub len: usize,
    /// Bytes that were done before it was submitted.
    pub done: usize,
    /// Bytes it is charged with while the device has it.
    pub charge: usize,
}

impl Task {
    /// The request in a descriptor; a read or write may have `max_bytes`.
    ///
    /// # Errors
    /// It is none of the operations that are offered, or its range is none.
    pub fn parse(descriptor: &IoDesc, max_bytes: usize) -> Result<Self, Error> {
        let op = match descriptor.op() {
            op::READ => Op::Read,
            op::WRITE => Op::Write,
            op::FLUSH => Op::Flush,
            op::DISCARD => Op::Discard,
            op::WRITE_ZEROES => Op::WriteZeroes,
            _ => return Err(Error::Unsupported),
        };
        if op == Op::Flush {
            // Its range says nothing.
            return Ok(Self::new(Request::flush(), 0));
        }
        let bytes = u64::from(descriptor.nr_sectors) * SECTOR_BYTES;
        let offset = descriptor.start_sector.checked_mul(SECTOR_BYTES).ok_or(Error::OutOfRange)?;
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
        Ok(Self::new(request, if has_data { bytes as usize } else { 0 }))
    }

    fn new(request: Request, len: usize) -> Self {
        Self { tag: 0, serial: 0, request, len, done: 0, charge: 0 }
    }

    /// What a success is told as: the bytes of data.
    pub fn result(&self) -> i32 {
        self.len as i32
    }
}

/// What failed, for who looks after the device.
pub fn failed(op: Op) -> Failed {
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
        Task::parse(&descriptor, MAX).map(|task| task.request)
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
        for op in [4, 6, 10, 13, 18, 32, 255] {
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
        assert_eq!(Task::parse(&descriptor, MAX).unwrap().result(), 8192);
        let flush = IoDesc { op_flags: 2, nr_sectors: 16, ..IoDesc::default() };
        assert_eq!(Task::parse(&flush, MAX).unwrap().result(), 0);
        for error in Error::ALL {
            assert!(result_of(error) < 0 && result_of(error) > -4096);
        }
        assert_eq!(result_of(Error::Unsupported), -95);
    }
}
