//! A request on its way: what of it the library is asked next, and how it is answered.
//!
//! Long ones are asked for piece by piece, one after the other, with the one buffer. What is to be
//! durable ends with a flush.

use freestone_core::device::{Completion, Error, Flags, IoBuf, Op, Request, Result};

/// Most data of a piece in bytes; a multiple of every block.
const MAX_DATA_BYTES: u64 = 16 << 20;
/// Largest range of a piece without data in bytes, so that one is not long under way. A multiple of
/// every block.
const MAX_EFFECT_BYTES: u64 = 1 << 30;

/// What the library is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// What to do.
    pub op: Op,
    /// Zeroes may become a hole.
    pub may_free: bool,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Where its data begins in the buffer, for reads and writes.
    pub at: usize,
}

/// A request that is not answered yet. The library has its buffer.
pub struct Job {
    /// As it was asked for.
    pub request: Request,
    done: Completion,
    /// Bytes that are done.
    at: u64,
    /// A flush was asked for.
    flushed: bool,
}

impl Job {
    /// A request of a user.
    pub fn new(request: Request, done: Completion) -> Self {
        Self { request, done, at: 0, flushed: false }
    }

    /// What is asked next of an image with so many bytes; `None` where nothing is left.
    pub fn next(&mut self, size: u64, buffer: &mut IoBuf) -> Option<Piece> {
        let Request { op, flags, offset, len } = self.request;
        // A device that ends with a whole block may be longer than the image.
        let end = (offset + len).min(size);
        let from = offset + self.at;
        let may_free = flags.contains(Flags::MAY_FREE);
        if op != Op::Flush && from < end {
            let has_data = matches!(op, Op::Read | Op::Write);
            let most = if has_data { MAX_DATA_BYTES } else { MAX_EFFECT_BYTES };
            return Some(Piece {
                op,
                may_free,
                offset: from,
                len: (end - from).min(most),
                at: self.at as usize,
            });
        }
        if op == Op::Read {
            let at = self.at as usize;
            buffer[at..].fill(0);
        }
        if self.flushed || !(op == Op::Flush || flags.contains(Flags::FUA) && op != Op::Read) {
            return None;
        }
        self.flushed = true;
        Some(Piece { op: Op::Flush, may_free: false, offset: 0, len: 0, at: 0 })
    }

    /// A piece succeeded.
    ///
    /// # Errors
    /// Less was read than was asked for: the image became smaller.
    pub fn did(&mut self, piece: &Piece, bytes: u64) -> Result<()> {
        if piece.op == Op::Read && bytes < piece.len {
            return Err(Error::Media);
        }
        self.at += piece.len;
        Ok(())
    }

    /// Answers it.
    pub fn finish(self, outcome: Result<()>, buffer: IoBuf) {
        self.done.complete(outcome, buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All pieces of a request, each as it is done.
    fn pieces(request: Request, size: u64) -> Vec<(Op, u64, u64, usize)> {
        let mut job = Job::new(request, Completion::new(|_, _| {}));
        let mut buffer =
            IoBuf::zeroed(if request.op == Op::Read { request.len as usize } else { 0 }).unwrap();
        let mut all = Vec::new();
        while let Some(piece) = job.next(size, &mut buffer) {
            all.push((piece.op, piece.offset, piece.len, piece.at));
            job.did(&piece, piece.len).unwrap();
        }
        all
    }

    #[test]
    fn long_ones_are_asked_for_in_pieces() {
        let data = MAX_DATA_BYTES;
        let all = pieces(Request::write(512, data + 512), 1 << 40);
        assert_eq!(all, [(Op::Write, 512, data, 0), (Op::Write, 512 + data, 512, data as usize)]);
        let all = pieces(Request::new(Op::Discard, 0, 3 << 30), 1 << 40);
        assert_eq!(all.iter().map(|piece| piece.1 >> 30).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn what_is_to_be_durable_ends_with_a_flush() {
        for op in [Op::Write, Op::Discard, Op::WriteZeroes] {
            let all = pieces(Request::new(op, 0, 512).with(Flags::FUA), 1 << 20);
            assert_eq!(all.iter().map(|piece| piece.0).collect::<Vec<_>>(), [op, Op::Flush]);
        }
        assert_eq!(pieces(Request::read(0, 512).with(Flags::FUA), 1 << 20).len(), 1);
        assert_eq!(pieces(Request::flush(), 1 << 20), [(Op::Flush, 0, 0, 0)]);
    }

    #[test]
    fn the_end_of_the_last_block_is_not_asked_for_and_reads_as_zeroes() {
        assert_eq!(pieces(Request::write(512, 512), 1000), [(Op::Write, 512, 488, 0)]);
        let mut job = Job::new(Request::read(512, 512), Completion::new(|_, _| {}));
        let mut buffer = IoBuf::copy_of(&[7; 512]).unwrap();
        let piece = job.next(1000, &mut buffer).unwrap();
        assert_eq!(job.did(&piece, 487), Err(Error::Media));
        job.did(&piece, 488).unwrap();
        assert_eq!(job.next(1000, &mut buffer), None);
        assert!(buffer[..488] == [7; 488] && buffer[488..] == [0; 24]);
    }
}
