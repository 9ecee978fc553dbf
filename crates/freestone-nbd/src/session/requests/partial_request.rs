//! Parsed requests, and the state of requests that take more than one turn.

use freestone_core::device::{IoBuf, Request};

use crate::wire::errno::{CommandGroup, Failure};
use crate::wire::headers::Tag;

/// A parsed request header, in the machine's byte order.
#[derive(Debug, Clone, Copy)]
pub struct ParsedHeader {
    /// Command flags, including unknown ones.
    pub flags: u16,
    pub tag: Tag,
    pub len: u64,
}

/// The state of the current request of a connection.
#[derive(Debug)]
pub enum PartialRequest {
    /// A large read with structured replies, executed in pieces. Each piece is one chunk of the reply.
    Read {
        slot: usize,
        /// The part of the request that is neither read nor submitted yet.
        request: Request,
    },
    /// A large read whose reply must be one piece.
    WholeRead(WholeRead),
    /// A read with a simple reply that is larger than the limit on bytes in flight.
    WindowedRead(WindowedRead),
    /// A large write to a device without zones, in pieces through the receive buffer.
    PieceWrite(PieceWrite),
    /// A large write to a device with zones, or one for a worker, which is received completely first.
    GatheredWrite(GatheredWrite),
    /// The payload of a refused request, which is discarded.
    SkippedPayload(SkippedPayload),
    /// A flush, trim or write zeroes, which has no payload.
    Plain {
        tag: Tag,
        /// The part of the request that is not done yet.
        request: Request,
        group: CommandGroup,
    },
}

#[derive(Debug)]
pub struct WholeRead {
    pub tag: Tag,
    /// The request, of which the device has read `filled` bytes.
    pub request: Request,
    /// A buffer for the whole request, charged to the bytes in flight.
    pub buffer: IoBuf,
    /// Number of bytes of the buffer filled so far.
    pub filled: usize,
}

/// A read whose reply is one piece, sent in several windows. No other request is in flight meanwhile, as no
/// other reply may interrupt the data.
#[derive(Debug)]
pub struct WindowedRead {
    pub tag: Tag,
    /// The part of the request whose data is not in the replies yet.
    pub rest: Request,
    /// Set after the header with the success code was added to the replies.
    pub has_header: bool,
    /// The buffer of the current window, charged to the bytes in flight, and the number of bytes read so far.
    pub reading: Option<(IoBuf, usize)>,
}

#[derive(Debug)]
pub struct PieceWrite {
    pub slot: usize,
    /// The part of the request that is neither written nor submitted. Its payload is next in the input.
    pub rest: Request,
}

/// A large write whose payload is received completely before the device or a worker executes the write.
#[derive(Debug)]
pub struct GatheredWrite {
    pub tag: Tag,
    /// The part of the request that is not written: all of it until the payload is complete.
    pub rest: Request,
    /// A buffer for the whole request, charged to the bytes in flight.
    pub buffer: IoBuf,
    /// Number of bytes of the buffer filled so far.
    pub filled: usize,
    /// True if a worker executes the write.
    pub uses_worker: bool,
}

impl GatheredWrite {
    /// Returns the space in the buffer for the rest of the payload.
    pub fn space(&mut self) -> &mut [u8] {
        &mut self.buffer[self.filled..]
    }

    /// Records that `n` bytes were put into [`space`](Self::space).
    pub fn fill(&mut self, n: usize) {
        self.filled += n;
    }
}

#[derive(Debug)]
pub struct SkippedPayload {
    pub tag: Tag,
    /// Number of bytes of the payload still to discard.
    pub left: u64,
    /// The error reply to send after the payload was discarded.
    pub failure: Failure,
}

/// Returns the rest of a request whose first `n` bytes the device has completed.
///
/// # Panics
/// If `n` is zero or not below the length, which violates the device's contract. The panic ends the
/// connection.
pub(in crate::session) fn advance(request: Request, n: u64) -> Request {
    assert!(n > 0 && n < request.len, "TryResult::Partly is at least one block and less than the whole");
    request.rest(n)
}
