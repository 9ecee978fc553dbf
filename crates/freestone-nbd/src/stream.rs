//! A request as it came, and what is left of one that takes more than one turn.

use freestone_core::device::{IoBuf, Request};

use crate::errno::{Action, Failure};
use crate::headers::Tag;

/// A request as it came, in the machine's byte order.
#[derive(Debug, Clone, Copy)]
pub struct Incoming {
    /// As they came, known ones and others.
    pub flags: u16,
    /// Its cookie and its first byte.
    pub tag: Tag,
    /// Length in bytes.
    pub len: u64,
}

/// The request at hand.
#[derive(Debug)]
pub enum Stream {
    /// A large structured read, in pieces with a chunk each.
    Read {
        /// Its operation.
        slot: usize,
        /// What is not yet read or submitted.
        request: Request,
    },
    /// A large read whose reply must be one piece.
    Whole(Whole),
    /// A simple reply that is larger than what may be in flight.
    Windows(Windows),
    /// A large write to a device without zones, in pieces through the receive buffer.
    Write(Write),
    /// A large write to a device with zones, or one that a worker does, received as a whole first.
    Gather(Gather),
    /// The payload of a request that was refused.
    Skip(Skip),
    /// A request without payload.
    Plain {
        /// What its reply repeats.
        tag: Tag,
        /// What is not yet done.
        request: Request,
        /// How its errors are mapped.
        action: Action,
    },
}

/// A large read into one buffer.
#[derive(Debug)]
pub struct Whole {
    /// What its reply repeats.
    pub tag: Tag,
    /// The whole request.
    pub request: Request,
    /// As long as the request, and charged.
    pub buffer: IoBuf,
    /// Bytes that were read.
    pub filled: usize,
}

/// A read whose reply is one piece but not one buffer. Nothing else is in flight meanwhile, as no
/// other reply may come between the data.
#[derive(Debug)]
pub struct Windows {
    /// What its reply repeats.
    pub tag: Tag,
    /// What is not yet in the replies.
    pub rest: Request,
    /// The header is in the replies: who reads has been told that all is well.
    pub begun: bool,
    /// The window at hand, and how much of it was read; charged.
    pub reading: Option<(IoBuf, usize)>,
}

/// A large write in pieces.
#[derive(Debug)]
pub struct Write {
    /// Its operation.
    pub slot: usize,
    /// What is not yet written or submitted; its payload comes next in the input.
    pub rest: Request,
}

/// A large write that is received as a whole before the device, or a worker, gets it.
#[derive(Debug)]
pub struct Gather {
    /// What its reply repeats.
    pub tag: Tag,
    /// What is not yet written: all of it, until the payload is complete.
    pub rest: Request,
    /// As long as the request, and charged.
    pub buffer: IoBuf,
    /// Bytes that were received.
    pub filled: usize,
    /// It is a worker's.
    pub hand_on: bool,
}

impl Gather {
    /// Where the next bytes of the payload go.
    pub fn space(&mut self) -> &mut [u8] {
        &mut self.buffer[self.filled..]
    }

    /// `n` bytes were put into [`space`](Self::space).
    pub fn fill(&mut self, n: usize) {
        self.filled += n;
    }
}

/// A payload that is thrown away.
#[derive(Debug)]
pub struct Skip {
    /// What its reply repeats.
    pub tag: Tag,
    /// Bytes of the payload that are still to come.
    pub left: u64,
    /// What is answered then.
    pub failure: Failure,
}

/// What is left of a request of which the device did `n` bytes. A device that claims nothing, or
/// the whole, breaks its contract; its caller's connection ends there.
pub(crate) fn advance(request: Request, n: u64) -> Request {
    assert!(n > 0 && n < request.len, "Tried::Partly is at least one block and less than the whole");
    request.rest(n)
}
