//! Writes: executed inline from the receive buffer, submitted, or begun as a request of several turns.

use freestone_core::device::{Buffer, Op, Request, TryResult};
use freestone_core::workers::MIN_BYTES;

use super::partial_request::{
    GatheredWrite, ParsedHeader, PartialRequest, PieceWrite, SkippedPayload, advance,
};
use crate::limits::max_payload;
use crate::proto::CommandFlags;
use crate::session::in_flight::memory_failure;
use crate::session::{ConnectionLost, Session, Step};
use crate::stream::input::RECEIVE_BUFFER_BYTES;
use crate::stream::replies::MAX_INLINE_BYTES;
use crate::wire::errno::{CommandGroup, Errno, Failure};
use crate::wire::headers::Tag;

impl Session<'_> {
    pub(super) fn handle_write(&mut self, incoming: ParsedHeader) -> Result<Step, ConnectionLost> {
        freestone_core::trail::step!();
        let vetted = self.validate(incoming, Op::Write, CommandFlags::empty(), CommandGroup::Store);
        let request = match vetted {
            Ok((request, _)) if incoming.len <= max_payload(&self.geometry).into() => request,
            other => {
                let failure = other.err();
                let failure = failure.unwrap_or(Failure::new(Errno::Inval, "too much in one write"));
                return Ok(self.skip_payload(incoming, failure));
            }
        };
        let tag = incoming.tag;
        let is_large = request.len >= MIN_BYTES;
        if is_large && let Some(step) = self.prepare_large_write(tag, request) {
            return Ok(step);
        }
        let all = self.header_bytes + request.len as usize;
        if self.input.data().len() < all {
            return Ok(Step::NeedInput(all));
        }
        let large = if is_large { Some(self.begin_large()) } else { None };
        let step = self.write_received(tag, request)?;
        if let Some(large) = large {
            self.end_large(&request, large, step);
            self.more_follows = !self.input.data().is_empty();
        }
        Ok(step)
    }

    /// Prepares a write of at least [`MIN_BYTES`] if a worker executes it or it does not fit in the receive
    /// buffer. Returns None for other writes.
    fn prepare_large_write(&mut self, tag: Tag, request: Request) -> Option<Step> {
        let len = request.len as usize;
        let uses_worker = len <= MAX_INLINE_BYTES && self.should_use_worker(&request, false);
        if !uses_worker && self.header_bytes + len <= RECEIVE_BUFFER_BYTES {
            return None;
        }
        if self.geometry.zones.is_none() && !uses_worker {
            self.accept_request();
            let slot = self.operations.open(tag, CommandGroup::Store, false);
            self.current = Some(PartialRequest::PieceWrite(PieceWrite { slot, rest: request }));
            return Some(Step::Done);
        }
        // A write to a zoned device, and one for a worker, is executed as a whole.
        if !self.try_admit(len) {
            return Some(Step::Stalled);
        }
        self.accept_request();
        if let Ok(buffer) = self.replies.buffers.take(len) {
            self.operations.charged += len;
            let gather = GatheredWrite { tag, rest: request, buffer, filled: 0, uses_worker };
            self.current = Some(PartialRequest::GatheredWrite(gather));
        } else {
            let failure = memory_failure(CommandGroup::Store, &request);
            self.current =
                Some(PartialRequest::SkippedPayload(SkippedPayload { tag, left: request.len, failure }));
        }
        Some(Step::Done)
    }

    /// Executes a write whose payload is completely in the input.
    fn write_received(&mut self, tag: Tag, request: Request) -> Result<Step, ConnectionLost> {
        let (header, len) = (self.header_bytes, request.len as usize);
        let mut rest = request;
        let result = loop {
            let payload = &self.input.data()[header + len - rest.len as usize..header + len];
            match self.device.try_io(&rest, Buffer::Write(payload)) {
                Ok(TryResult::Done) => break Ok(()),
                Ok(TryResult::Partly(n)) => {
                    rest = advance(rest, n);
                    self.replies.send_around(self.link.socket(), 0)?;
                }
                Ok(TryResult::WouldBlock) => {
                    let left = rest.len as usize;
                    if !self.try_admit(left) {
                        if left == len {
                            return Ok(Step::Stalled);
                        }
                        // The device has written the first part. The rest is written when fewer bytes are in
                        // flight.
                        self.accept_request();
                        self.input.consume(len - left);
                        let slot = self.operations.open(tag, CommandGroup::Store, false);
                        self.current = Some(PartialRequest::PieceWrite(PieceWrite { slot, rest }));
                        return Ok(Step::Done);
                    }
                    let payload = &self.input.data()[header + len - left..header + len];
                    match self.replies.buffers.copy_of(payload) {
                        Ok(buffer) => {
                            let slot = self.operations.open(tag, CommandGroup::Store, false);
                            self.operations.get(slot).open = false;
                            self.submit(slot, rest, buffer, false);
                            self.accept_request();
                            self.input.consume(len);
                            return Ok(Step::Done);
                        }
                        Err(error) => break Err(error),
                    }
                }
                Err(error) => break Err(error),
            }
        };
        self.accept_request();
        self.input.consume(len);
        match result {
            Ok(()) => self.reply_done(tag)?,
            Err(error) => self.reply_failure(tag, &Failure::of(error, CommandGroup::Store, &request))?,
        }
        Ok(Step::Done)
    }
}
