//! A request on its way: what of it is asked of the server next, and how it is answered.
//!
//! What is larger than the server takes at once is asked for piece by piece, one after the other,
//! with the one buffer.

use freestone_core::device::{Completion, Error, Flags, IoBuf, Op, Request, Result};
use freestone_core::sync::Instant;
use freestone_nbd_proto::{CommandFlags, TransmissionFlags, command};

use crate::facts::Facts;

/// Largest range without data in bytes: a server is not busy with one piece for long, and others get
/// their turn. A multiple of every block.
const MAX_EFFECT_BYTES: u64 = 1 << 30;
/// Zeroes that are written where the server cannot make them itself, in bytes at once.
const ZEROES_BYTES: u64 = 1 << 20;

/// A descriptor of block status: length and flags.
pub type Status = (u32, u32);
/// Who hears of block status.
type StatusDone = Box<dyn FnOnce(Result<Vec<Status>>) + Send>;

/// Who is answered.
enum Done {
    Io(Completion),
    Status(StatusDone),
}

/// A request that is not answered yet.
pub struct Job {
    /// As it was asked for.
    pub request: Request,
    /// Its memory.
    pub buffer: IoBuf,
    /// Of block status: what came.
    pub status: Vec<Status>,
    /// Order of arrival.
    pub number: u64,
    /// Its place among those that may overlap.
    pub ticket: Option<usize>,
    /// Until when it waits for a server; none while all is well.
    pub deadline: Option<Instant>,
    /// Of a flush: the writes that it makes durable.
    pub covers: u64,
    /// A flush whose writes may be lost.
    pub doomed: bool,
    done: Done,
    /// Bytes that are done.
    at: u64,
    /// What is left is to make it durable.
    flushing: bool,
}

/// What is asked of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// One of [`command`].
    pub command: u16,
    /// Its flags.
    pub flags: CommandFlags,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// Where its data begins in the buffer; the command says whether it has some.
    pub at: usize,
}

impl Piece {
    /// Whether it changes what the server holds without making that durable.
    pub fn leaves_unflushed(&self) -> bool {
        matches!(self.command, command::WRITE | command::TRIM | command::WRITE_ZEROES)
            && !self.flags.contains(CommandFlags::FUA)
    }

    /// The data that goes to the server.
    pub fn payload(&self) -> std::ops::Range<usize> {
        if self.command == command::WRITE { self.at..self.at + self.len as usize } else { 0..0 }
    }
}

impl Job {
    /// A request of a user.
    pub fn new(request: Request, buffer: IoBuf, done: Completion) -> Self {
        Self::with(request, buffer, Done::Io(done))
    }

    /// A question after what lies in a range.
    pub fn status(offset: u64, len: u64, done: StatusDone) -> Self {
        Self::with(Request::read(offset, len), IoBuf::empty(), Done::Status(done))
    }

    fn with(request: Request, buffer: IoBuf, done: Done) -> Self {
        Self {
            request,
            buffer,
            status: Vec::new(),
            number: 0,
            ticket: None,
            deadline: None,
            covers: 0,
            doomed: false,
            done,
            at: 0,
            flushing: false,
        }
    }

    /// Whether it is block status.
    pub fn is_status(&self) -> bool {
        matches!(self.done, Done::Status(_))
    }

    /// Whether it changes content.
    pub fn changes(&self) -> bool {
        matches!(self.request.op, Op::Write | Op::Discard | Op::WriteZeroes)
    }

    /// Whether a user asked for a flush.
    pub fn is_flush(&self) -> bool {
        self.request.op == Op::Flush
    }

    /// Whether it ends with a flush, since the server knows no FUA.
    fn flushes_at_end(&self, facts: &Facts) -> bool {
        self.changes()
            && self.request.flags.contains(Flags::FUA)
            && !facts.has(TransmissionFlags::SEND_FUA)
            && facts.has(TransmissionFlags::SEND_FLUSH)
    }

    /// A server was lost on the way. What is to be durable is done from the start, as nothing that was
    /// answered of it need be there; half an answer is forgotten.
    pub fn begin_again(&mut self) {
        self.status.clear();
        if self.request.flags.contains(Flags::FUA) && self.changes() {
            (self.at, self.flushing) = (0, false);
        }
    }

    /// What is asked next; `None` where nothing is left.
    ///
    /// # Errors
    /// There is no memory for zeroes.
    pub fn next(&mut self, facts: &Facts) -> Result<Option<Piece>> {
        let piece = |command, flags, offset, len: u64, at| {
            Ok(Some(Piece { command, flags, offset, len: len as u32, at }))
        };
        let none = CommandFlags::empty();
        if self.is_flush() || self.flushing {
            let can = facts.has(TransmissionFlags::SEND_FLUSH) && !self.flushed();
            return if can { piece(command::FLUSH, none, 0, 0, 0) } else { Ok(None) };
        }
        let Request { op, flags, offset, len } = self.request;
        if self.is_status() {
            return if self.at == 0 { piece(command::BLOCK_STATUS, none, offset, len, 0) } else { Ok(None) };
        }
        // A device that ends with a whole block may be longer than the export.
        let end = (offset + len).min(facts.size);
        let from = offset + self.at;
        if from >= end {
            if op == Op::Read {
                let at = self.at as usize;
                self.buffer[at..].fill(0);
            }
            if self.flushes_at_end(facts) {
                (self.flushing, self.at) = (true, 0);
                return piece(command::FLUSH, none, 0, 0, 0);
            }
            return Ok(None);
        }
        let fua = flags.contains(Flags::FUA) && facts.has(TransmissionFlags::SEND_FUA);
        let durable = if fua { CommandFlags::FUA } else { none };
        let left = end - from;
        let data = left.min(u64::from(facts.blocks.maximum));
        let at = self.at as usize;
        match op {
            Op::Read => piece(command::READ, none, from, data, at),
            Op::Write => piece(command::WRITE, durable, from, data, at),
            Op::Discard if !facts.has(TransmissionFlags::SEND_TRIM) => Ok(None),
            Op::Discard => piece(command::TRIM, durable, from, left.min(MAX_EFFECT_BYTES), 0),
            Op::WriteZeroes if facts.has(TransmissionFlags::SEND_WRITE_ZEROES) => {
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

    /// A piece was answered.
    pub fn advance(&mut self, piece: &Piece) {
        match piece.command {
            command::FLUSH | command::BLOCK_STATUS => self.at = 1,
            _ => self.at += u64::from(piece.len),
        }
    }

    /// Answers it.
    pub fn finish(self, outcome: Result<()>) {
        match self.done {
            Done::Io(done) => {
                // Zeroes that were made here are nobody's.
                let own = matches!(self.request.op, Op::Read | Op::Write);
                let buffer = if own { self.buffer } else { IoBuf::empty() };
                done.complete(outcome, buffer);
            }
            Done::Status(done) => done(outcome.map(|()| self.status)),
        }
    }
}

/// What a user is told of an error of the server.
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
    use crate::facts::BlockSizes;

    fn facts(size: u64, flags: TransmissionFlags) -> Facts {
        let blocks = BlockSizes { minimum: 1, preferred: 4096, maximum: 4096 };
        let flags = flags | TransmissionFlags::HAS_FLAGS;
        Facts::checked(size, flags.bits(), Some(blocks), true, None).unwrap()
    }

    fn pieces(request: Request, facts: &Facts) -> Vec<(u16, u16, u64, u32)> {
        let buffer = match request.op {
            Op::Read | Op::Write => IoBuf::zeroed(request.len as usize).unwrap(),
            _ => IoBuf::empty(),
        };
        let mut job = Job::new(request, buffer, Completion::new(|_, _| {}));
        let mut all = Vec::new();
        while let Some(piece) = job.next(facts).unwrap() {
            all.push((piece.command, piece.flags.bits(), piece.offset, piece.len));
            job.advance(&piece);
        }
        all
    }

    #[test]
    fn large_requests_are_asked_for_in_pieces_and_end_where_the_export_does() {
        let facts = facts(10_000, TransmissionFlags::SEND_TRIM);
        let read = pieces(Request::read(512, 9728), &facts);
        assert_eq!(read, [(0, 0, 512, 4096), (0, 0, 4608, 4096), (0, 0, 8704, 1296)]);
        assert_eq!(pieces(Request::new(Op::Discard, 0, 10_240), &facts), [(4, 0, 0, 10_000)]);
    }

    #[test]
    fn what_the_server_cannot_do_is_done_with_what_it_can() {
        let plain = facts(1 << 20, TransmissionFlags::SEND_FLUSH);
        let fua = Request::write(0, 4096).with(Flags::FUA);
        assert_eq!(pieces(fua, &plain), [(1, 0, 0, 4096), (3, 0, 0, 0)]);
        assert_eq!(pieces(Request::new(Op::Discard, 0, 4096), &plain), []);
        let zeroes = Request::new(Op::WriteZeroes, 4096, 8192);
        assert_eq!(pieces(zeroes, &plain), [(1, 0, 4096, 4096), (1, 0, 8192, 4096)]);
        let none = facts(1 << 20, TransmissionFlags::empty());
        assert_eq!(pieces(Request::flush(), &none), []);
        assert_eq!(pieces(fua, &none), [(1, 0, 0, 4096)]);
        let all = facts(1 << 20, TransmissionFlags::SEND_FUA | TransmissionFlags::SEND_WRITE_ZEROES);
        assert_eq!(pieces(fua, &all), [(1, 1, 0, 4096)]);
        assert_eq!(pieces(zeroes, &all), [(6, 2, 4096, 8192)]);
        assert_eq!(pieces(zeroes.with(Flags::MAY_FREE), &all), [(6, 0, 4096, 8192)]);
    }
}
