//! Parsed requests, and the state of requests that take more than one turn.

use freestone_core::device::{IoBuf, Request};

use crate::errno::{Action, Failure};
use crate::headers::Tag;

/// A parsed request header, in the machine's byte order.
#[derive(Debug, Clone, Copy)]
pub struct Incoming {
    /// Command flags, including unknown ones.
    pub flags: u16,
    pub tag: Tag,
    pub len: u64,
}

/// The state of the current request.
#[derive(Debug)]
pub enum Stream {
    /// A large structured read, in pieces with a chunk each.
    Read {
        slot: usize,
        /// The range that is neither read nor submitted.
        request: Request,
    },
    /// A large read whose reply must be one piece.
    Whole(Whole),
    /// A read with a simple reply that is larger than the limit on bytes in flight.
    Windows(Windows),
    /// A large write to a device without zones, in pieces through the receive buffer.
    Write(Write),
    /// A large write to a device with zones, or one for a worker, which is received completely first.
    Gather(Gather),
    /// The payload of a refused request, which is discarded.
    Skip(Skip),
    /// A request without payload.
    Plain {
        tag: Tag,
        /// The range that is not done.
        request: Request,
        action: Action,
    },
}

#[derive(Debug)]
pub struct Whole {
    pub tag: Tag,
    /// The whole request.
    pub request: Request,
    /// A buffer for the whole request, charged.
    pub buffer: IoBuf,
    /// Bytes of the buffer filled so far.
    pub filled: usize,
}

/// A read whose reply is one piece, sent in several windows. No other request is in flight meanwhile, as no
/// other reply may come between the data.
#[derive(Debug)]
pub struct Windows {
    pub tag: Tag,
    /// The range whose data is not in the replies yet.
    pub rest: Request,
    /// Set after the header with the success code was added to the replies.
    pub has_header: bool,
    /// The buffer of the current window, charged, and the bytes read so far.
    pub reading: Option<(IoBuf, usize)>,
}

#[derive(Debug)]
pub struct Write {
    pub slot: usize,
    /// The range that is neither written nor submitted. Its payload is next in the input.
    pub rest: Request,
}

/// A large write that is received completely before the device or a worker gets it.
#[derive(Debug)]
pub struct Gather {
    pub tag: Tag,
    /// The range that is not written: all of it until the payload is complete.
    pub rest: Request,
    /// A buffer for the whole request, charged.
    pub buffer: IoBuf,
    /// Bytes of the buffer filled so far.
    pub filled: usize,
    /// True if a worker executes the write.
    pub uses_worker: bool,
}

impl Gather {
    /// Returns the buffer for the rest of the payload.
    pub fn space(&mut self) -> &mut [u8] {
        &mut self.buffer[self.filled..]
    }

    /// Records that `n` bytes were put into [`space`](Self::space).
    pub fn fill(&mut self, n: usize) {
        self.filled += n;
    }
}

#[derive(Debug)]
pub struct Skip {
    pub tag: Tag,
    /// Bytes of the payload still to discard.
    pub left: u64,
    /// The error reply to send afterwards.
    pub failure: Failure,
}

/// Returns the rest of a request of which the device did `n` bytes.
///
/// # Panics
/// If `n` is zero or the whole length, which breaks the device's contract. This ends the connection.
pub(crate) fn advance(request: Request, n: u64) -> Request {
    assert!(n > 0 && n < request.len, "Tried::Partly is at least one block and less than the whole");
    request.rest(n)
}
