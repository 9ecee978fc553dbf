//! A request in progress: the librbd calls made for the request, and its completion.
//!
//! A large request is split into pieces, which are submitted one after the other and share the
//! buffer of the request. A FUA request ends with a flush.

use freestone_core::device::{Completion, Error, Flags, IoBuf, Op, Request, Result};

/// Maximum data of a read or write piece in bytes; a multiple of every block size.
const MAX_DATA_BYTES: u64 = 16 << 20;
/// Maximum range in bytes of a discard or write zeroes piece, which bounds the time of one librbd
/// call. A multiple of every block size.
const MAX_EFFECT_BYTES: u64 = 1 << 30;

/// One librbd call of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub op: Op,
    /// For write zeroes: librbd may free the range instead of writing zeroes.
    pub may_free: bool,
    pub offset: u64,
    pub len: u64,
    /// For reads and writes: offset of the data in the buffer.
    pub at: usize,
}

/// A request that is not complete yet. librbd holds the buffer of the request.
pub struct Job {
    pub request: Request,
    done: Completion,
    /// Number of bytes of the request that are finished.
    at: u64,
    /// True if the flush at the end of the request was issued.
    flush_issued: bool,
}

impl Job {
    pub fn new(request: Request, done: Completion) -> Self {
        Self { request, done, at: 0, flush_issued: false }
    }

    /// Returns the next piece for an image of `size` bytes, or `None` if all pieces are finished.
    pub fn next_piece(&mut self, size: u64, buffer: &mut IoBuf) -> Option<Piece> {
        let Request { op, flags, offset, len } = self.request;
        // The size of the device is rounded up to a whole block, so a request may end beyond the
        // image.
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
        if self.flush_issued || !(op == Op::Flush || flags.contains(Flags::FUA) && op != Op::Read) {
            return None;
        }
        self.flush_issued = true;
        Some(Piece { op: Op::Flush, may_free: false, offset: 0, len: 0, at: 0 })
    }

    /// Records that `piece` succeeded with `bytes` bytes transferred.
    ///
    /// # Errors
    /// [`Error::Media`] if a read returned fewer bytes than requested, which means that the image
    /// has shrunk.
    pub fn advance(&mut self, piece: &Piece, bytes: u64) -> Result<()> {
        if piece.op == Op::Read && bytes < piece.len {
            return Err(Error::Media);
        }
        self.at += piece.len;
        Ok(())
    }

    pub fn finish(self, outcome: Result<()>, buffer: IoBuf) {
        self.done.complete(outcome, buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(request: Request, size: u64) -> Vec<(Op, u64, u64, usize)> {
        let mut job = Job::new(request, Completion::new(|_, _| {}));
        let mut buffer =
            IoBuf::zeroed(if request.op == Op::Read { request.len as usize } else { 0 }).unwrap();
        let mut all = Vec::new();
        while let Some(piece) = job.next_piece(size, &mut buffer) {
            all.push((piece.op, piece.offset, piece.len, piece.at));
            job.advance(&piece, piece.len).unwrap();
        }
        all
    }

    #[test]
    fn large_requests_are_split_into_pieces() {
        let data = MAX_DATA_BYTES;
        let all = pieces(Request::write(512, data + 512), 1 << 40);
        assert_eq!(all, [(Op::Write, 512, data, 0), (Op::Write, 512 + data, 512, data as usize)]);
        let all = pieces(Request::new(Op::Discard, 0, 3 << 30), 1 << 40);
        assert_eq!(all.iter().map(|piece| piece.1 >> 30).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn fua_request_ends_with_flush() {
        for op in [Op::Write, Op::Discard, Op::WriteZeroes] {
            let all = pieces(Request::new(op, 0, 512).with(Flags::FUA), 1 << 20);
            assert_eq!(all.iter().map(|piece| piece.0).collect::<Vec<_>>(), [op, Op::Flush]);
        }
        assert_eq!(pieces(Request::read(0, 512).with(Flags::FUA), 1 << 20).len(), 1);
        assert_eq!(pieces(Request::flush(), 1 << 20), [(Op::Flush, 0, 0, 0)]);
    }

    #[test]
    fn padding_is_not_requested_and_reads_as_zeroes() {
        assert_eq!(pieces(Request::write(512, 512), 1000), [(Op::Write, 512, 488, 0)]);
        let mut job = Job::new(Request::read(512, 512), Completion::new(|_, _| {}));
        let mut buffer = IoBuf::copy_of(&[7; 512]).unwrap();
        let piece = job.next_piece(1000, &mut buffer).unwrap();
        assert_eq!(job.advance(&piece, 487), Err(Error::Media));
        job.advance(&piece, 488).unwrap();
        assert_eq!(job.next_piece(1000, &mut buffer), None);
        assert!(buffer[..488] == [7; 488] && buffer[488..] == [0; 24]);
    }
}
