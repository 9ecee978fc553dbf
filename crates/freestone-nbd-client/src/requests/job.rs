//! A request in progress: the commands sent for it, and its completion.
//!
//! A request larger than the server's maximum is sent in pieces, one after the other, all from the buffer of
//! the request.

use freestone_core::device::{Completion, Error, Flags, IoBuf, Op, Request, Result};
use freestone_core::sync::Instant;
use freestone_nbd_proto::{CommandFlags, TransmissionFlags, command};

use crate::link::export_info::ExportInfo;

/// Largest `TRIM` or `WRITE_ZEROES` command in bytes, so that no command keeps a server busy for long. A
/// multiple of every block size.
const MAX_EFFECT_BYTES: u64 = 1 << 30;
/// Zeroes per `WRITE` in bytes, if the server does not support `WRITE_ZEROES`.
const ZEROES_BYTES: u64 = 1 << 20;

/// A block status descriptor: length in bytes, and flags.
pub type Status = (u32, u32);
type StatusDone = Box<dyn FnOnce(Result<Vec<Status>>) + Send>;

enum JobCompletion {
    Io(Completion),
    Status(StatusDone),
}

/// A request that is not complete yet.
pub struct Job {
    pub request: Request,
    /// Data of the request; for emulated write zeroes, a buffer of zeroes.
    pub buffer: IoBuf,
    /// Received block status descriptors.
    pub status: Vec<Status>,
    /// Serial number of the request, in the order of submission.
    pub number: u64,
    /// Id in the overlap tracker; `None` for a request without a range.
    pub ticket: Option<usize>,
    /// Time at which the request fails if no server is reachable; `None` until a connection is lost.
    pub deadline: Option<Instant>,
    /// For a flush: number of completed writes that it makes durable.
    pub covered_writes: u64,
    /// Set for a flush that must fail because writes that it covers may be lost.
    pub must_fail: bool,
    done: JobCompletion,
    /// Number of bytes done. 1 after a flush or a block status query is done.
    at: u64,
    /// Set when the data is written, and only the flush that emulates FUA is left.
    flushing: bool,
}

/// An NBD command of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The NBD command, one of the [`command`] constants.
    pub command: u16,
    pub flags: CommandFlags,
    pub offset: u64,
    pub len: u32,
    /// Offset of the data in the buffer, for commands with data.
    pub at: usize,
}

impl Piece {
    /// Returns true if the command changes data without making it durable.
    pub fn leaves_unflushed(&self) -> bool {
        matches!(self.command, command::WRITE | command::TRIM | command::WRITE_ZEROES)
            && !self.flags.contains(CommandFlags::FUA)
    }

    /// Returns the range of the buffer that is sent; empty for commands without a payload.
    pub fn payload(&self) -> std::ops::Range<usize> {
        if self.command == command::WRITE { self.at..self.at + self.len as usize } else { 0..0 }
    }
}

impl Job {
    pub fn new(request: Request, buffer: IoBuf, done: Completion) -> Self {
        Self::with(request, buffer, JobCompletion::Io(done))
    }

    pub fn status(offset: u64, len: u64, done: StatusDone) -> Self {
        Self::with(Request::read(offset, len), IoBuf::empty(), JobCompletion::Status(done))
    }

    fn with(request: Request, buffer: IoBuf, done: JobCompletion) -> Self {
        Self {
            request,
            buffer,
            status: Vec::new(),
            number: 0,
            ticket: None,
            deadline: None,
            covered_writes: 0,
            must_fail: false,
            done,
            at: 0,
            flushing: false,
        }
    }

    pub fn is_status(&self) -> bool {
        matches!(self.done, JobCompletion::Status(_))
    }

    /// Returns true if the request changes content.
    pub fn changes(&self) -> bool {
        matches!(self.request.op, Op::Write | Op::Discard | Op::WriteZeroes)
    }

    pub fn is_flush(&self) -> bool {
        self.request.op == Op::Flush
    }

    /// Returns true if FUA is emulated with a flush, as the server does not support FUA.
    fn flushes_at_end(&self, export_info: &ExportInfo) -> bool {
        self.changes()
            && self.request.flags.contains(Flags::FUA)
            && !export_info.has(TransmissionFlags::SEND_FUA)
            && export_info.has(TransmissionFlags::SEND_FLUSH)
    }

    /// Prepares the request for a new session. A FUA request restarts, as the server may have lost the pieces
    /// that it completed. Partial block status is dropped.
    pub fn restart(&mut self) {
        self.status.clear();
        if self.request.flags.contains(Flags::FUA) && self.changes() {
            (self.at, self.flushing) = (0, false);
        }
    }

    /// Returns the next command, or `None` if the request is finished.
    ///
    /// # Errors
    /// No memory for a buffer of zeroes.
    pub fn next_piece(&mut self, export_info: &ExportInfo) -> Result<Option<Piece>> {
        let piece = |command, flags, offset, len: u64, at| {
            Ok(Some(Piece { command, flags, offset, len: len as u32, at }))
        };
        let none = CommandFlags::empty();
        if self.is_flush() || self.flushing {
            let can = export_info.has(TransmissionFlags::SEND_FLUSH) && !self.flushed();
            return if can { piece(command::FLUSH, none, 0, 0, 0) } else { Ok(None) };
        }
        let Request { op, flags, offset, len } = self.request;
        if self.is_status() {
            return if self.at == 0 { piece(command::BLOCK_STATUS, none, offset, len, 0) } else { Ok(None) };
        }
        // The device's size is rounded up to a whole block and may exceed the export.
        let end = (offset + len).min(export_info.size);
        let from = offset + self.at;
        if from >= end {
            if op == Op::Read {
                let at = self.at as usize;
                self.buffer[at..].fill(0);
            }
            if self.flushes_at_end(export_info) {
                (self.flushing, self.at) = (true, 0);
                return piece(command::FLUSH, none, 0, 0, 0);
            }
            return Ok(None);
        }
        let fua = flags.contains(Flags::FUA) && export_info.has(TransmissionFlags::SEND_FUA);
        let durable = if fua { CommandFlags::FUA } else { none };
        let left = end - from;
        let data = left.min(u64::from(export_info.blocks.maximum));
        let at = self.at as usize;
        match op {
            Op::Read => piece(command::READ, none, from, data, at),
            Op::Write => piece(command::WRITE, durable, from, data, at),
            Op::Discard if !export_info.has(TransmissionFlags::SEND_TRIM) => Ok(None),
            Op::Discard => piece(command::TRIM, durable, from, left.min(MAX_EFFECT_BYTES), 0),
            Op::WriteZeroes if export_info.has(TransmissionFlags::SEND_WRITE_ZEROES) => {
                let hole = flags.contains(Flags::MAY_FREE);
                let keep = if hole { none } else { CommandFlags::NO_HOLE };
                piece(command::WRITE_ZEROES, durable | keep, from, left.min(MAX_EFFECT_BYTES), 0)
            }
            Op::WriteZeroes => {
                let len = data.min(ZEROES_BYTES);
                if self.buffer.is_empty() {
                    self.buffer = IoBuf::zeroed(ZEROES_BYTES.min(self.request.len) as usize)?;
                }
                piece(command::WRITE, durable, from, len, 0)
            }
            Op::Flush => Ok(None),
        }
    }

    fn flushed(&self) -> bool {
        self.at > 0
    }

    /// Records that the server completed a piece.
    pub fn advance(&mut self, piece: &Piece) {
        match piece.command {
            command::FLUSH | command::BLOCK_STATUS => self.at = 1,
            _ => self.at += u64::from(piece.len),
        }
    }

    pub fn finish(self, outcome: Result<()>) {
        match self.done {
            JobCompletion::Io(done) => {
                // A buffer of zeroes was allocated here and is not the caller's.
                let own = matches!(self.request.op, Op::Read | Op::Write);
                let buffer = if own { self.buffer } else { IoBuf::empty() };
                done.complete(outcome, buffer);
            }
            JobCompletion::Status(done) => done(outcome.map(|()| self.status)),
        }
    }
}

/// Maps an NBD errno to a device error.
pub fn error_of(errno: u32, op: Op) -> Error {
    use freestone_nbd_proto::errno;
    match errno {
        errno::PERM if op != Op::Read => Error::ReadOnly,
        errno::NOSPC => Error::NoSpace,
        errno::NOTSUP => Error::Unsupported,
        _ => Error::Media,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::export_info::BlockSizes;

    fn export_info(size: u64, flags: TransmissionFlags) -> ExportInfo {
        let blocks = BlockSizes { minimum: 1, preferred: 4096, maximum: 4096 };
        let flags = flags | TransmissionFlags::HAS_FLAGS;
        ExportInfo::validate(size, flags.bits(), Some(blocks), true, None).unwrap()
    }

    fn pieces(request: Request, export_info: &ExportInfo) -> Vec<(u16, u16, u64, u32)> {
        let buffer = match request.op {
            Op::Read | Op::Write => IoBuf::zeroed(request.len as usize).unwrap(),
            _ => IoBuf::empty(),
        };
        let mut job = Job::new(request, buffer, Completion::new(|_, _| {}));
        let mut all = Vec::new();
        while let Some(piece) = job.next_piece(export_info).unwrap() {
            all.push((piece.command, piece.flags.bits(), piece.offset, piece.len));
            job.advance(&piece);
        }
        all
    }

    #[test]
    fn large_requests_are_split_and_clipped_to_export() {
        let export_info = export_info(10_000, TransmissionFlags::SEND_TRIM);
        let read = pieces(Request::read(512, 9728), &export_info);
        assert_eq!(read, [(0, 0, 512, 4096), (0, 0, 4608, 4096), (0, 0, 8704, 1296)]);
        assert_eq!(pieces(Request::new(Op::Discard, 0, 10_240), &export_info), [(4, 0, 0, 10_000)]);
    }

    #[test]
    fn unsupported_commands_are_emulated() {
        let plain = export_info(1 << 20, TransmissionFlags::SEND_FLUSH);
        let fua = Request::write(0, 4096).with(Flags::FUA);
        assert_eq!(pieces(fua, &plain), [(1, 0, 0, 4096), (3, 0, 0, 0)]);
        assert_eq!(pieces(Request::new(Op::Discard, 0, 4096), &plain), []);
        let zeroes = Request::new(Op::WriteZeroes, 4096, 8192);
        assert_eq!(pieces(zeroes, &plain), [(1, 0, 4096, 4096), (1, 0, 8192, 4096)]);
        let none = export_info(1 << 20, TransmissionFlags::empty());
        assert_eq!(pieces(Request::flush(), &none), []);
        assert_eq!(pieces(fua, &none), [(1, 0, 0, 4096)]);
        let all = export_info(1 << 20, TransmissionFlags::SEND_FUA | TransmissionFlags::SEND_WRITE_ZEROES);
        assert_eq!(pieces(fua, &all), [(1, 1, 0, 4096)]);
        assert_eq!(pieces(zeroes, &all), [(6, 2, 4096, 8192)]);
        assert_eq!(pieces(zeroes.with(Flags::MAY_FREE), &all), [(6, 0, 4096, 8192)]);
    }
}
